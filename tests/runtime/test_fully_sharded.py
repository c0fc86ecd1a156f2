"""Compressed FSDP2: its own all-gathers and reduce-scatters, sent as the strategy says."""

from __future__ import annotations

from pathlib import Path

import pytest

from laconic.compression import Compressor
from laconic.errors import IllegalCombination
from laconic.strategy import Strategy
from tests.processes import run_processes
from tests.strategy.generate import variants

pytestmark = [pytest.mark.timeout(240), pytest.mark.dist]


@pytest.mark.slow
def test_uncompressed_it_is_fsdp2_in_every_bit() -> None:
    for result in run_processes(
        "tests.runtime.fully_sharded_ranks:equal_to_native", world_size=4, arguments={"steps": 10}, timeout_s=220
    ):
        assert len(result.value) > 15
        assert [name for name, right in result.value.items() if not right] == []


@pytest.mark.slow
def test_bytes_are_those_predicted_on_uneven_and_empty_shards() -> None:
    strategies = [f"bsp / sharded(weights={weights}) / int8 / fusion" for weights in ("none", "bf16", "int8", "int4")]
    strategies += [
        "bsp / sharded(weights=int8, between=int4) / int8 / fusion",
        "bsp / sharded(between=bf16) / int4 + error_feedback(residual=int8) / fusion",
        "bsp / sharded(between=none) / none / fusion",
    ]
    for method in variants("compression"):
        assert isinstance(method, Compressor)
        try:
            strategies.append(str(Strategy.parse(f"bsp / sharded(weights=int8) / {method} / fusion")))
        except IllegalCombination:
            continue
    assert len(strategies) > 15
    for result in run_processes(
        "tests.runtime.fully_sharded_ranks:bytes_of",
        world_size=4,
        arguments={"strategies": strategies, "steps": 3},
        timeout_s=220,
    ):
        assert result.value.keys() == set(strategies)
        for strategy, found in result.value.items():
            assert found["finite"], strategy
            if "warmup" not in strategy:
                assert found["guessed"] == found["first"], strategy
                assert found["sent"] == found["predicted"], strategy


_SAYS = {
    "not sharded": "this model is not sharded. Call fully_shard()",
    "partly": "is in no module that fully_shard() was called on",
    "another group": 'attach with process_group=mesh["shard"]',
    "another order": "but process_group has ranks 3, 2, 1, 0",
    "a larger group": 'attach with process_group=mesh["shard"]',
    "native HSDP": "Shard over one dimension",
    "several dtypes": "have several dtypes",
    "by columns": "Leave shard_placement_fn out",
    "attached": "already attached",
    "find_unused_parameters": "has no effect",
    "sync_optimizer": "have no effect",
    "init_sync": "have no effect",
    "after all that": "set_gradient_divide_factor()",
}


@pytest.mark.slow
def test_what_cannot_work_is_refused_by_every_rank() -> None:
    for result in run_processes("tests.runtime.fully_sharded_ranks:misuse", world_size=4, timeout_s=200):
        assert result.value.keys() == _SAYS.keys()
        for name, found in result.value.items():
            assert _SAYS[name] in found["said"], (name, found["said"])
            assert found["seconds"] < 5.0, name


@pytest.mark.slow
def test_residuals_are_saved_and_training_continues_bit_for_bit(tmp_path: Path) -> None:
    arguments = {"steps": 4, "folder": str(tmp_path)}
    for result in run_processes(
        "tests.runtime.fully_sharded_ranks:resume", world_size=4, arguments=arguments, timeout_s=100
    ):
        assert result.value == {"memory": True, "disk": True}


@pytest.mark.slow
def test_compressed_inside_and_diloco_between() -> None:
    for result in run_processes(
        "tests.runtime.fully_sharded_ranks:inside_and_between", world_size=4, arguments={"steps": 8}, timeout_s=100
    ):
        apart = result.value["apart"]
        assert apart[3] == apart[7] == 0.0
        assert min(apart[:3] + apart[4:7]) > 0.0
        assert result.value["steps"] == (8, 8)
        assert min(result.value["sent"]) > 0


@pytest.mark.slow
def test_a_peer_that_goes_is_named() -> None:
    results = run_processes(
        "tests.runtime.fully_sharded_ranks:a_peer_goes",
        world_size=3,
        arguments={"step": 2},
        timeout_s=60,
        may_fail=True,
    )
    assert results[1].exit_code == 9
    for result in (results[0], results[2]):
        assert result.exit_code == 0, result.stderr[-2000:]
        assert "rank 1" in result.value, result.value
