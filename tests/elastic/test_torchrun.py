"""The same script under torchrun: a fixed set of ranks, and a warning."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laconic
from tests.processes import run_processes


def train() -> dict[str, object]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers = torch.arange(20.0).view(-1, 1).expand(-1, 4)
    used: list[float] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        session = laconic.attach(model, optimizer, "bsp", elastic=laconic.Elastic(max_ranks=4), timeout_s=30)
    with session:
        for (inputs,) in session.batches(DataLoader(TensorDataset(numbers), batch_size=5, shuffle=True), epochs=2):
            used += inputs[:, 0].tolist()
            model(inputs / 20).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return {
        "used": used,
        "weight": model.weight.detach(),
        "told": " ".join(str(warning.message) for warning in told),
        "rank": int(os.environ["RANK"]) - session.rank,
        "views": len(session.views),
    }


@pytest.mark.dist
def test_a_script_for_laconic_run_works_under_torchrun() -> None:
    results = [result.value for result in run_processes("tests.elastic.test_torchrun:train", world_size=2)]
    assert sorted(results[0]["used"] + results[1]["used"]) == sorted([*range(20), *range(20)])
    assert torch.equal(results[0]["weight"], results[1]["weight"])
    for result in results:
        assert "not started by laconic run" in result["told"]
        assert (result["rank"], result["views"]) == (0, 0)
