"""The runtime over NCCL, with several ranks on one GPU."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.processes import run_processes
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
        assert result.value["memory_mib"]["laconic"] <= 1.05 * result.value["memory_mib"]["ddp"]


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
    from laconic.cluster import Cluster, Link
    from laconic.lab.launch import run_ranks
    from laconic.lab.virtual_hosts import VirtualHosts, places_on

    with VirtualHosts(Cluster.uniform(4, Link(bandwidth_bps=100e6))) as hosts:
        run_ranks([sys.executable, "-c", _NOTHING_IS_OVERWRITTEN], places_on(hosts, gpu=True), timeout_s=100)
