"""The runtime over NCCL, with several ranks on one GPU."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.processes import RankResult, run_processes
from tests.runtime.gpu_ranks import BESIDE, FAMILIES, OPTIMIZERS, STEPS
from tests.runtime.replicas import assert_equal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("world_size", [2, 4])
def test_equal_to_ddp_bit_for_bit_over_nccl(world_size: int) -> None:
    results = run_processes(
        "tests.runtime.ranks:equal_to_ddp_over_nccl",
        world_size=world_size,
        arguments={"strategy": "bsp / all_reduce / none / fusion(25MiB)", "steps": 20},
        timeout_s=200,
    )
    for result in results:
        assert_equal(result.value["states"]["laconic"], result.value["states"]["ddp"])
        assert_equal(result.value["states"]["laconic"], results[0].value["states"]["laconic"])
        assert result.value["counted"] == result.value["predicted"] > 0
        # Gradients of a bucket are copied together, so they live until it is complete.
        assert result.value["memory_mib"]["laconic"] <= 1.05 * result.value["memory_mib"]["ddp"] + 1.0


def test_lossy_strategies_keep_replicas_identical_over_nccl() -> None:
    results = run_processes(
        "tests.runtime.ranks:equal_to_ddp_over_nccl",
        world_size=3,
        arguments={"strategy": "bsp / all_reduce / bf16 + error_feedback / wfbp", "steps": 10},
        timeout_s=200,
    )
    for result in results:
        assert_equal(result.value["states"]["laconic"], results[0].value["states"]["laconic"])
        assert result.value["counted"] == result.value["predicted"] > 0


_NOTHING_IS_OVERWRITTEN = """
import torch, torch.distributed as dist
from torch import nn
import laconic
torch.cuda.set_device(0)
dist.init_process_group("nccl")
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(30)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
with laconic.attach(model, optimizer, "ddp-bf16", init_sync=False, timeout_s=60):
    for step in range(20):
        model(torch.ones(2, 64, device="cuda")).square().mean().backward()
        mine = [torch.full((16,), 7.0, device="cuda") for _ in range(300)]
        torch.cuda.synchronize()
        assert all(bool((tensor == 7).all()) for tensor in mine), f"step {step}: memory was overwritten"
        del mine
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_an_exchange_nobody_waits_for_overwrites_nothing() -> None:
    """Behind a slow link the exchange outlives the backward pass that started it."""
    pytest.importorskip("pyroute2", reason="virtual hosts need pyroute2")
    from laconic.cluster import Cluster, Link
    from laconic.lab.launch import run_ranks
    from laconic.lab.virtual_hosts import VirtualHosts, places_on

    with VirtualHosts(Cluster.uniform(4, Link(bandwidth_bps=100e6))) as hosts:
        run_ranks([sys.executable, "-c", _NOTHING_IS_OVERWRITTEN], places_on(hosts, gpu=True), timeout_s=100)


@pytest.fixture(scope="module", params=[2, 4])
def families(request: pytest.FixtureRequest) -> list[RankResult]:
    return run_processes("tests.runtime.gpu_ranks:every_family", world_size=request.param, timeout_s=280)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_into_the_loop_over_nccl(family: str, optimizer: str, families: list[RankResult]) -> None:
    """Replicas end equal, and lossless strategies with what DDP gives up to rounding."""
    key = f"{family}, {optimizer}"
    if key not in families[0].value:
        pytest.skip("servers hold no fused optimizer")
    for result in families:
        found = result.value[key]["model"]
        assert result.value[key]["steps"] == STEPS
        assert all(bool(value.isfinite().all()) for value in found.values())
        assert_equal(found, families[0].value[key]["model"])
        # Adam makes a whole step of the rounding in a gradient that is almost zero.
        if optimizer == "sgd" and ("none" in FAMILIES[family] or family == "servers"):
            # DDP leaves each rank its own statistics after the last forward pass; laconic's detach() does not.
            expected = families[0].value[f"ddp, {optimizer}"]["model"]
            for name, value in found.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)


def test_collectives_of_the_script_beside_exchanges_in_flight() -> None:
    """Kernels of two communicators that ranks launch in different orders wait for each other forever."""
    results = run_processes(
        "tests.runtime.gpu_ranks:beside_collectives_of_the_script", world_size=4, arguments={}, timeout_s=280
    )
    assert all(result.value == results[0].value for result in results)
    assert set(results[0].value) == set(BESIDE)


def test_compressed_fsdp2_over_nccl() -> None:
    for result in run_processes(
        "tests.runtime.fully_sharded_ranks:over_nccl", world_size=4, arguments={"steps": 10}, timeout_s=280
    ):
        assert [name for name, right in result.value.items() if not right] == []


def test_sharded_models_equal_native_hsdp_over_nccl() -> None:
    for result in run_processes(
        "tests.runtime.shard_ranks:equal_to_native_over_nccl", world_size=4, arguments={"steps": 10}, timeout_s=280
    ):
        assert [name for name, right in result.value.items() if not right] == []


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_cannot_be_read_before_they_are_averaged(world_size: int) -> None:
    """The communication stream is late with every sum; the training stream must wait for it, in DDP's hook too."""
    results = run_processes("tests.runtime.gpu_ranks:late_sums_on_a_ddp_model", world_size=world_size, timeout_s=200)
    for result in results:
        for kind in ("laconic on ddp", "laconic"):
            for found, expected in zip(result.value[kind], result.value["ddp"], strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_grad_scaler_over_nccl() -> None:
    results = run_processes("tests.runtime.gpu_ranks:with_grad_scaler", world_size=2, timeout_s=200)
    for key in results[0].value:
        for result in results:
            assert all(bool(value.isfinite().all()) for value in result.value[key]["model"].values())
            assert_equal(result.value[key]["model"], results[0].value[key]["model"])
