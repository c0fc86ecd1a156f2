"""The same script under torchrun: a fixed set of ranks, and a warning."""

from __future__ import annotations

import json
import os
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset

import laconic
from laconic.errors import AttachError
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


class _Backwards(SequentialSampler):
    def __iter__(self):
        return iter(range(len(self) - 1, -1, -1))


def loops() -> dict[str, str]:
    """What is raised for each mistake, by name, and which samples are used."""
    data = TensorDataset(torch.randn(24, 4))
    usual = {"batch_size": 6, "shuffle": True}

    def of(session: laconic.Session, **settings: object) -> object:
        return session.batches(DataLoader(data, **settings), seed=0)

    def one_epoch_again_and_again(session: laconic.Session) -> None:
        for _ in range(2):
            for _ in session.batches(DataLoader(data, **usual)):
                pass

    def two_at_once(session: laconic.Session) -> None:
        first = session.batches(DataLoader(data, **usual))
        other = session.batches(DataLoader(TensorDataset(torch.randn(12, 4)), **usual))
        list(zip(first, other, strict=False))

    def another_seed(session: laconic.Session) -> None:
        session.batches(DataLoader(data, **usual), seed=session.rank)

    cases = {
        "replacement": lambda s: of(s, batch_size=6, sampler=RandomSampler(data, replacement=True)),
        "fewer": lambda s: of(s, batch_size=6, sampler=RandomSampler(data, num_samples=12)),
        "own sampler": lambda s: of(s, batch_size=6, sampler=_Backwards(data)),
        "generator": lambda s: of(s, **usual, generator=torch.Generator()),
        "order": lambda s: of(s, **usual, num_workers=1, in_order=False),
        "again": one_epoch_again_and_again,
        "two at once": two_at_once,
        "seed": another_seed,
    }
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = {}
    for name, case in cases.items():
        with laconic.attach(model, optimizer, "bsp", elastic=laconic.Elastic(), timeout_s=30) as session:
            try:
                case(session)
            except AttachError as error:
                said[name] = str(error)
    said["resumed"] = str(sorted(_interrupted(model, optimizer)))
    # Two epochs one after the other, and the rest of an epoch that was left.
    with laconic.attach(model, optimizer, "bsp", elastic=laconic.Elastic(), timeout_s=30) as session:
        loader = DataLoader(data, **usual, num_workers=1, persistent_workers=True)
        counts = [sum(len(one) for (one,) in session.batches(loader, epochs=epoch + 1)) for epoch in range(2)]
        assert session.epoch == 2
        batches = session.batches(loader, epochs=3)
        for _ in batches:
            break
        counts.append(sum(len(one) for (one,) in batches))
        said["counts"] = str(counts)
    return said


def _interrupted(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """The samples of one epoch that are used before a checkpoint, and after it in another session."""
    numbers = torch.arange(24.0).view(-1, 1).expand(-1, 4)
    loader, used = DataLoader(TensorDataset(numbers), batch_size=6, shuffle=True), []
    with laconic.attach(model, optimizer, "bsp", elastic=laconic.Elastic(), timeout_s=30) as session:
        for (inputs,) in session.batches(loader, seed=5):
            used += inputs[:, 0].tolist()
            model(inputs / 24).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            saved = session.state_dict()
            if session.step == 3:
                break
    with laconic.attach(model, optimizer, "bsp", elastic=laconic.Elastic(), timeout_s=30) as session:
        session.load_state_dict(saved)
        used += [number for (inputs,) in session.batches(loader, seed=5) for number in inputs[:, 0].tolist()]
        session.load_state_dict(saved)  # and once more, in the middle of a loop
        repeated = []
        for (inputs,) in session.batches(loader, seed=5):
            repeated += inputs[:, 0].tolist()
            if len(repeated) == 3:
                session.load_state_dict(saved)
    assert repeated == used[-3:] * 2
    return used


@pytest.mark.slow
@pytest.mark.dist
def test_loops_over_batches_continue_from_a_checkpoint_and_mistakes_are_named() -> None:
    results = run_processes("tests.elastic.test_torchrun:loops", world_size=2)
    halves = [json.loads(result.value["resumed"]) for result in results]
    assert sorted(halves[0] + halves[1]) == list(range(24))
    for result in results:
        said = result.value
        assert "with replacement, or another number" in said["replacement"]
        assert "with replacement, or another number" in said["fewer"]
        assert "either shuffle=True or no sampler" in said["own sampler"]
        assert "session.batches(loader, seed=...)" in said["generator"]
        assert "in_order=False" in said["order"]
        assert "session.batches(loader, epochs=epoch + 1)" in said["again"]
        assert "two loops over session.batches()" in said["two at once"]
        assert "seed is 0 on rank 0 and 1 on rank 1" in said["seed"]
        assert said["counts"] == "[12, 12, 9]"
