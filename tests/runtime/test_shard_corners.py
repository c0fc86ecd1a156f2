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
        assert result.value == expected


def test_what_differs_only_between_shards_is_refused_by_every_rank() -> None:
    for result in run_processes(f"{_RANKS}:differing_by_shard", world_size=4, timeout_s=100):
        mine = "diloco(period=2)" if result.rank % 2 else "bsp / all_reduce / none"
        says = {
            "another strategy": f"which has strategy {mine}",
            "another optimizer": "lr in parameter group 0 is"
            if result.rank % 2
            else "a rank that holds another piece of the model cannot attach",
            "made before": 'parameter "0.weight" is sharded, and the optimizer still holds the whole tensor',
            "made before, inside": "Make the optimizer after fully_shard()",
            "a name": "process_group must be a process group or a mesh of one dimension, got 'replicate'",
        }
        assert result.value.keys() == says.keys()
        for name, (said, seconds) in result.value.items():
            assert says[name] in said, (name, said)
            assert seconds < 5.0, name


@pytest.mark.parametrize("strategy", ["bsp / sharded", "bsp / sharded(weights=int8) / int8 + error_feedback"])
def test_evaluation_in_inference_mode(strategy: str) -> None:
    for result in run_processes(f"{_RANKS}:evaluated", world_size=2, arguments={"strategy": strategy}, timeout_s=100):
        assert result.value == {"losses": True, "parameters": True}


def test_a_mixture_of_replicas_is_not_loaded(tmp_path: Path) -> None:
    for result in run_processes(
        f"{_RANKS}:resumed_from_one_copy", world_size=4, arguments={"folder": str(tmp_path)}, timeout_s=100
    ):
        assert "is not the one this session state was saved with" in result.value["between rounds"]
        assert "call session.average() before you save" in result.value["between rounds"]
        assert result.value["averaged"] == "loaded"
