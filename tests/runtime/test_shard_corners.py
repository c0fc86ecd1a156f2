"""Sharded models in awkward loops and with mistakes that only some ranks of a shard group make."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import run_processes

pytestmark = [pytest.mark.timeout(120), pytest.mark.dist]

_RANKS = "tests.runtime.shard_corner_ranks"


def test_all_shards_agree_on_which_parameters_have_gradients() -> None:
    expected = {
        "bsp / all_reduce / none / fusion": [True, True, False, True],
        "bsp / all_reduce / none / wfbp": [True, True, False, True],
        "bsp / all_reduce / int8 + error_feedback / wfbp": [True, True, True, True],
    }
    for result in run_processes(
        f"{_RANKS}:unused_in_one_replica", world_size=4, arguments={"strategies": list(expected)}, timeout_s=100
    ):
        assert result.value["gradients"] == expected
        # Where the vector's shard is empty, and in a bucket of its own, ranks ask whatever the answer was.
        must_ask = {strategy: result.rank % 2 == 1 and not strategy.endswith("fusion") for strategy in expected}
        assert all(result.value["answers read"][strategy] == 0 for strategy in expected if must_ask[strategy])
        assert any(result.value["answers read"].values())


@pytest.mark.slow
def test_what_differs_only_between_shards_is_refused_by_every_rank() -> None:
    for result in run_processes(f"{_RANKS}:differing_by_shard", world_size=4, timeout_s=100):
        odd = result.rank % 2 == 1
        elsewhere = "AttachError: a rank that holds another piece of the model cannot attach"
        rate = "lr in parameter group 0 = " + ("1.0" if odd else "0.003")
        replaced = "is sharded, and the optimizer still holds the whole tensor"
        says = {
            "another strategy": f"which has strategy {'diloco(period=2)' if odd else 'bsp / all_reduce / none'}",
            "a strategy with a typo": 'UnknownName: strategy: "bps"' if odd else elsewhere,
            "another optimizer": "lr in parameter group 0 is" if odd else elsewhere,
            "another learning rate": rate,
            "another learning rate, local updates": rate,
            "another learning rate, inside": rate,
            "unused parameters": f"which has find_unused_parameters {False if odd else None}",
            "frozen": "which has parameters",
            "made before": replaced if odd else elsewhere,
            "made before, inside": replaced if odd else elsewhere,
            "a name": "must be a process group or a mesh of one dimension, got 'replicate'" if odd else elsewhere,
            "a group of others": "this rank is not a member of the process group" if odd else elsewhere,
            "nothing": "attached",
            "taken over": "attached",
        }
        assert result.value.keys() == says.keys()
        for name, (said, seconds) in result.value.items():
            assert says[name] in said, (name, said)
            assert seconds < 10.0, name


@pytest.mark.slow
def test_ranks_of_sharded_models_that_part_are_not_sent_to_join() -> None:
    results = run_processes(f"{_RANKS}:not_together", world_size=2, timeout_s=100)
    for result in results:
        assert result.value["operations"].endswith("after the same number of steps.")
    assert "join(), which is not for sharded models" in results[1].value["steps"]


def test_shards_on_two_meshes_agree() -> None:
    late_s = 4.0
    for result in run_processes(f"{_RANKS}:on_two_meshes", world_size=4, arguments={"late_s": late_s}, timeout_s=100):
        failed = "AttachError: a rank that holds another piece of the model cannot attach"
        own = "AttachError: a problem of its own"
        says = {
            "one fails": failed if result.rank else own,
            "one differs": f"which has strategy {'another' if result.rank == 3 else 'same'}",
            "the others are late": failed if result.rank else own,
            "all attach": "attached",
        }
        for name, (said, seconds) in result.value.items():
            assert says[name] in said, (name, said)
            assert seconds < late_s, name


def test_checksums_of_shards() -> None:
    for result in run_processes(f"{_RANKS}:checksums_of_shards", world_size=4, timeout_s=100):
        assert set(result.value.values()) == {True}, result.value


@pytest.mark.parametrize("strategy", ["bsp / sharded", "bsp / sharded(weights=int8) / int8 + error_feedback"])
def test_evaluation_in_inference_mode(strategy: str) -> None:
    for result in run_processes(f"{_RANKS}:evaluated", world_size=2, arguments={"strategy": strategy}, timeout_s=100):
        assert result.value == {"losses": True, "parameters": True}


@pytest.mark.slow
def test_a_mixture_of_replicas_is_not_loaded(tmp_path: Path) -> None:
    for result in run_processes(
        f"{_RANKS}:resumed_from_one_copy", world_size=4, arguments={"folder": str(tmp_path)}, timeout_s=100
    ):
        assert "is not the one this session state was saved with" in result.value["between rounds"]
        assert "call session.average() before you save" in result.value["between rounds"]
        assert result.value["averaged"] == "loaded"
