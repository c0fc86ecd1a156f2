"""The runtime over NCCL, with several ranks on one GPU."""

from __future__ import annotations

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
