"""The runtime on real processes over Gloo."""

from __future__ import annotations

import signal
from concurrent.futures import Future
from itertools import product

import pytest
import torch

from tests.processes import RankResult, SignalAfterLine, run_processes, start_together
from tests.runtime.replicas import assert_equal

Begun = dict[str, Future[list[RankResult]]]

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(120)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_equal_to_ddp_bit_for_bit(world_size: int) -> None:
    results = run_processes(
        "tests.runtime.ranks:equal_to_ddp",
        world_size=world_size,
        arguments={"strategy": "bsp / all_reduce / none / fusion(25MiB)", "steps": 20},
        timeout_s=110,
    )
    for result, model in product(results, ["mlp", "gpt", "cnn"]):
        found = result.value[model]
        assert_equal(found["laconic"], found["ddp"])
        assert_equal(found["after_detach"], results[0].value[model]["after_detach"])
        assert found["numbers"]["counted"] == found["numbers"]["predicted"] > 0
        assert found["numbers"]["buckets"] > 1, "one bucket alone would not test the boundaries"


@pytest.mark.parametrize("strategy", ["ddp", "bsp / all_reduce / bf16 + error_feedback"])
def test_a_model_already_wrapped_in_ddp(strategy: str) -> None:
    results = run_processes(
        "tests.runtime.ranks:wrapped_in_ddp", world_size=2, arguments={"strategy": strategy, "steps": 10}
    )
    for result in results:
        value = result.value
        assert value["counted"] == value["predicted"] > 0
        assert "already attached" in value["twice"]
        assert_equal(value["end"], results[0].value["end"])
        if strategy == "ddp":
            assert_equal(value["laconic"], value["ddp"])
            assert value["state"] == []
        else:
            assert value["state"] == [
                "0.bias",
                "0.weight",
                "2.bias",
                "2.weight",
                "4.bias",
                "4.weight",
                "6.bias",
                "6.weight",
            ]
            for name, tensor in value["laconic"].items():
                torch.testing.assert_close(tensor, value["ddp"][name], rtol=0.1, atol=0.02)


def test_accumulation_on_a_model_wrapped_in_ddp() -> None:
    results = run_processes("tests.runtime.ranks:accumulates_under_ddp", world_size=2)
    for result in results:
        value = result.value
        assert value["inside"] == 0
        assert value["outside"] == value["predicted"] > 0
        assert "find_unused_parameters has no effect" in value["refusal"]
        assert_equal(value["state"], results[0].value["state"])


def test_ddp_schedules_for_itself_and_anything_else_is_refused() -> None:
    messages = run_processes("tests.runtime.ranks:refuses_other_schedules", world_size=2)[0].value
    assert len(messages) == 2
    assert all('schedules buckets itself as "fusion"' in message for message in messages)


def _lost(world_size: int, victim: int, how: str, struck_by: signal.Signals | None = None) -> dict[str, object]:
    return {
        "target": "tests.runtime.ranks:stops_when_a_rank_is_lost",
        "world_size": world_size,
        "arguments": {"victim": victim, "how": how},
        "send_signal": None if struck_by is None else SignalAfterLine(victim, "ready", struck_by),
    }


@pytest.fixture(scope="module")
def losses() -> Begun:
    """Every way to lose a rank, several at a time: the others mostly wait."""
    return start_together(
        {
            "stop": _lost(2, 0, "stop", signal.SIGSTOP),
            "stall": _lost(2, 1, "stall"),
            "never attaches": {"target": "tests.runtime.ranks:one_rank_never_attaches", "world_size": 3},
            "kill": _lost(3, 1, "kill", signal.SIGKILL),
            "leave": _lost(2, 1, "leave"),
            "raise": _lost(3, 2, "raise"),
        }
    )


def test_a_rank_killed_in_the_middle_is_named_by_the_others(losses: Begun) -> None:
    results = losses["kill"].result()
    assert results[1].exit_code == -signal.SIGKILL
    for survivor in (results[0], results[2]):
        error = survivor.value["error"]
        assert error.startswith("PeerLost")
        assert "rank 1 stopped answering" in error
        assert "all_reduce(sum) of" in error
        assert "step 5" in error
        assert survivor.value["seconds"] < 10


def test_a_frozen_rank_that_hosts_the_store_does_not_hang_the_others(losses: Begun) -> None:
    results = losses["stop"].result()
    error = results[1].value["error"]
    assert error.startswith("PeerLost")
    assert "rank 0" in error
    assert results[1].value["seconds"] < 15


def test_a_rank_that_raises_is_named_with_its_error(losses: Begun) -> None:
    results = losses["raise"].result()
    assert results[2].value["error"] == "ValueError: the data loader broke"
    for survivor in results[:2]:
        assert survivor.value["error"].startswith("PeerLost")
        assert "rank 2 raised ValueError: the data loader broke" in survivor.value["error"]
        assert survivor.value["seconds"] < 4


def test_a_rank_that_stalls_is_named_with_what_it_was_doing(losses: Begun) -> None:
    results = losses["stall"].result()
    error = results[0].value["error"]
    assert "did not finish in 4 s" in error
    assert 'rank 1 says "step' in error
    assert results[1].value["error"].startswith("PeerLost"), "the staller learns that the others gave up"


def test_a_rank_that_leaves_early_is_named(losses: Begun) -> None:
    results = losses["leave"].result()
    assert "rank 1" in results[0].value["error"]
    assert "detached" in results[0].value["error"]


@pytest.mark.parametrize("steps", [9, 4000])
def test_a_step_that_one_rank_leaves_out_is_noticed_during_training_or_at_its_end(steps: int) -> None:
    """The number of exchanges is the same on all ranks, so nothing else would notice it."""
    strategies = ["bsp", "bsp / all_reduce / randomk(density=0.5) + error_feedback", "onebit_adam"]
    results = run_processes(
        "tests.runtime.ranks:leaves_out_a_step",
        world_size=3,
        arguments={"strategies": strategies, "steps": steps},
        timeout_s=100,
    )
    for strategy in strategies:
        found = [result.value[strategy] for result in results]
        assert any("a step was left out on one rank alone" in one["error"] for one in found), found
        assert all("rank 1 has made" in one["error"] for one in found if one["error"]), found
        if steps > 9:
            assert all(one["error"] and one["made"] < steps for one in found), found


def test_a_rank_that_never_attaches_is_named(losses: Begun) -> None:
    results = losses["never attaches"].result()
    for rank in (0, 2):
        assert "rank 1 did not attach" in results[rank].value


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_cannot_attach_says_so_to_the_others(victim: int) -> None:
    ran = run_processes("tests.runtime.ranks:one_rank_cannot_attach", world_size=3, arguments={"victim": victim})
    rest = [rank for rank in range(3) if rank != victim]
    why = 'raised UnknownName while attaching: strategy: "bps" is neither'
    for rank in rest:
        for case, group in (("early", [0, 1, 2]), ("late", [0, 1, 2]), ("group", sorted([victim, rest[0]]))):
            said, took_s = ran[rank].value[case]
            if rank in group:
                place = group.index
                assert f"attaching on rank {place(rank)} cannot finish: rank {place(victim)} {why}" in said
                assert took_s < 5, "not after the timeout of 60 s"
        assert_equal(ran[rank].value["state"], ran[victim].value["state"])
    assert ran[victim].value["late"][0].startswith('UnknownName: strategy: "bps" is neither')


def test_ranks_that_attach_different_things_are_told_what_differs() -> None:
    for result in run_processes("tests.runtime.ranks:ranks_disagree", world_size=2):
        strategies, models = result.value
        assert "strategy is bsp / all_reduce / none / fusion on rank 0" in strategies
        assert "bsp / all_reduce / fp16 / fusion on rank 1" in strategies
        assert "parameter 0.weight is (7, 5) float32 (cpu) on rank 0 and (8, 5) float32 (cpu) on rank 1" in models


def test_process_groups_that_are_part_of_the_job() -> None:
    results = run_processes("tests.runtime.ranks:in_two_halves", world_size=4)
    for first, second in ((0, 1), (2, 3)):
        assert_equal(results[first].value["state"], results[second].value["state"])
    assert not torch.equal(results[0].value["state"]["weight"], results[2].value["state"]["weight"])
    assert results[3].value["sizes"] == [[1, 2], [1, 2]]


def test_collectives_of_the_script_do_not_mix_with_ours() -> None:
    results = run_processes("tests.runtime.ranks:user_collectives_do_not_mix", world_size=2)
    assert_equal(results[0].value, results[1].value)


def test_distributed_checkpoint_keeps_every_ranks_state(tmp_path) -> None:
    results = run_processes(
        "tests.runtime.ranks:distributed_checkpoint", world_size=2, arguments={"folder": str(tmp_path / "checkpoint")}
    )
    for result in results:
        assert result.value["step"] == 3
        assert_equal(result.value["resumed"], result.value["uninterrupted"])


def test_a_script_that_forgets_to_detach_still_ends() -> None:
    run_processes("tests.runtime.ranks:ends_without_detaching", world_size=2, timeout_s=40)
