"""Servers and workers in processes of their own, over Gloo and sockets."""

from __future__ import annotations

import pytest
import torch

from tests.processes import run_processes
from tests.runtime.replicas import assert_equal

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(120)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_bsp_with_servers_equals_all_reduce(world_size: int) -> None:
    exact = ["none", "powersgd(rank=2) + error_feedback"]
    lossy = ["topk(density=1.0, indices=int32)", "int8", "topk(density=0.3) + error_feedback"]
    results = run_processes(
        "tests.runtime.servers.ranks:equal_to_all_reduce",
        world_size=world_size,
        arguments={"compressions": [*exact, *lossy]},
        timeout_s=100,
    )
    for result in results:
        for compression, found in result.value.items():
            assert_equal(found["parameter_server"], results[0].value[compression]["parameter_server"])
            for name, value in found["parameter_server"].items():
                usual = found["all_reduce"][name]
                if compression in exact and world_size == 2:
                    assert torch.equal(value, usual), f"{compression}: {name}"
                elif compression in exact or "1.0" in compression:
                    # Gloo adds up in another order than the ranks'.
                    torch.testing.assert_close(value, usual, rtol=1e-5, atol=1e-6)
                else:
                    # Sums are encoded once more on the way back.
                    plain = result.value["none"]["all_reduce"][name]
                    torch.testing.assert_close(value, plain, rtol=0, atol=0.02 if compression == "int8" else 0.3)


def test_ssp_and_asp_train() -> None:
    strategies = [
        "asp / parameter_server",
        "asp(learning_rate=staleness, delay_compensation=0.1) / parameter_server / int8",
        "ssp(staleness=1) / parameter_server / topk(density=0.2) + error_feedback",
        "ssp(staleness=0) / parameter_server(shards=1)",
        "local_sgd(period=4) / parameter_server / int8",
    ]
    results = run_processes(
        "tests.runtime.servers.ranks:losses", world_size=3, arguments={"strategies": strategies, "steps": 60}
    )
    for strategy in strategies:
        for result in results:
            found = result.value[strategy]
            assert found["after"] < 0.6 * found["before"], (strategy, found["before"], found["after"])
            assert_equal(found["model"], results[0].value[strategy]["model"])


def test_no_step_waits_for_a_slow_worker_and_its_gradients_are_counted_as_dropped() -> None:
    steps, pause_s = 6, 2.0
    results = run_processes(
        "tests.runtime.servers.ranks:beside_a_slow_one",
        world_size=3,
        arguments={"strategy": "backup(spare=1)", "steps": steps, "pause_s": pause_s},
        timeout_s=100,
    )
    assert results[1].value["seconds"] >= steps * pause_s
    for fast in (results[0], results[2]):
        assert fast.value["seconds"] < 0.5 * steps * pause_s, "it waits for the slow one"
        assert_equal(fast.value["model"], results[1].value["model"])
    assert results[1].value["dropped"] >= steps - 1
    assert results[0].value["dropped"] + results[2].value["dropped"] <= 2


def test_ranks_meet_after_their_loops_though_one_has_missed_many_updates() -> None:
    results = run_processes(
        "tests.runtime.servers.ranks:after_a_long_pause",
        world_size=3,
        arguments={"strategy": "backup(spare=1)", "steps": 40, "pause_s": 1.0},
        timeout_s=100,
    )
    for result in results:
        assert result.value["seconds"] < 30, "the timeout is 60 s"
        assert result.value["left"] == []
        assert_equal(result.value["model"], results[1].value["model"])
    assert results[1].value["dropped"] > 1


def test_a_server_in_a_child_process_and_what_it_leaves_behind() -> None:
    results = run_processes("tests.runtime.servers.ranks:with_child_processes", world_size=2, timeout_s=100)
    assert [result.value["children"] for result in results] == [[0, 1, 0], [0, 0, 0]]
    for result in results:
        value = result.value
        assert value["threads left"] == []
        before, after = value["descriptors"]
        assert len(after) <= len(before), set(after) - set(before)
        assert_equal(value["loaded"], results[0].value["values"])
        assert value["again"].keys() == value["saved"].keys()
        for name, fields in value["saved"].items():
            assert_equal(value["again"][name], fields)
    fields = {field for fields in results[0].value["saved"].values() for field in fields}
    expected = ("fields|1", "step|0", "exp_avg|1", "exp_avg|2", "exp_avg_sq|1", "exp_avg_sq|2")
    assert fields == {f"server.{name}" for name in expected}
    assert all(fields["server.step|0"].item() == 10 for fields in results[0].value["saved"].values())
    assert results[1].value["saved"] == {}
