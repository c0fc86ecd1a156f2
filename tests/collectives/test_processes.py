"""Collectives between real processes over Gloo."""

from __future__ import annotations

import pytest
import torch

from tests.processes import run_processes
from tests.runtime.replicas import assert_equal

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(120)]


def test_sums_bytes_and_training_beside_ddp() -> None:
    results = run_processes("tests.collectives.ranks:sums", world_size=4, arguments={"steps": 5}, timeout_s=100)
    for result in results:
        value = result.value
        assert value["one host"] == ((0, 1, 2, 3),)
        assert value["hosts"] == ((0, 1), (2, 3))
        assert [key for key, right in value.items() if right is False] == []
        for algorithm in ("ring", "halving_doubling", "hierarchical", "auto"):
            assert_equal(value[algorithm], results[0].value[algorithm])
            for name, expected in value["ddp"].items():
                torch.testing.assert_close(value[algorithm][name], expected, rtol=1e-5, atol=1e-6)
