"""Train with each optimizer under each schedule, over links whose delays differ by rank and operation."""

from __future__ import annotations

import copy
import random
import re
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch

import laconic
from laconic.core.in_process import InProcessTransport
from laconic.core.paced import PacedLink, PacedTransport
from laconic.errors import LaconicError, LaconicWarning
from tests.beside_ddp.optimizers import ROWS, Row
from tests.runtime.replicas import data

SCHEDULES = {
    "sequential": "sequential",
    "wfbp": "wfbp",
    "fusion": "fusion(bytes=512, first_bytes=128)",
    "mg_wfbp": "mg_wfbp",
    "priority": "priority(partition_bytes=1024, credit_bytes=2048)",
    "dear": "dear(bytes=512)",
}
DEFERRING = ("priority", "dear")
STEPS = 8
"""Enough for every schedule to find its plan and to follow it for a while."""
WORLD_SIZE = 2


class JitteredLink(PacedLink):
    """Every operation takes as long as chance will have it, on each rank by itself."""

    def __init__(self, rank: int, longest_s: float = 0.002) -> None:
        super().__init__(1e12)
        self._random = random.Random(rank)
        self._longest_s = longest_s

    def reserve(self, nbytes: int) -> float:
        """See PacedLink."""
        return self.clock.now() + self._random.uniform(0, self._longest_s)


@dataclass(frozen=True)
class Result:
    """What came of one cell of the matrix."""

    states: tuple[dict[str, Any], ...]
    """Of every replica: parameters, the optimizer's state, and numbers on the optimizer itself."""
    warned: tuple[str, ...]
    """What laconic warned of."""
    refused: str = ""


def train(row: Row, schedule: str) -> Result:
    """Train all replicas; a refusal is a result too."""
    original = row.model()  # once: seeding and drawing in several threads would interleave

    def one_rank(transport: InProcessTransport) -> dict[str, Any]:
        return _one_rank(row, copy.deepcopy(original), schedule, transport)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            states = tuple(laconic.InProcessCluster(WORLD_SIZE, timeout_s=10).run(one_rank))
        except LaconicError as exc:
            return Result((), (), refused=f"{type(exc).__name__}: {exc}")
    return Result(states, tuple(str(w.message) for w in caught if issubclass(w.category, LaconicWarning)))


def _one_rank(row: Row, model: torch.nn.Module, schedule: str, transport: InProcessTransport) -> dict[str, Any]:
    rank, chance = transport.rank, random.Random(transport.rank)
    optimizer = row.make(model)
    jittered = PacedTransport(transport, JitteredLink(rank), timeout_s=10)
    after = row.prepare(optimizer) if row.prepare is not None else None
    with laconic.attach(model, optimizer, f"bsp / all_reduce / none / {schedule}", transport=jittered):
        for step in range(STEPS):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(data(step, rank, 4, 6)).square().mean()
                loss.backward()
                return loss

            if row.closure:
                optimizer.step(closure)
            else:
                closure()
                time.sleep(chance.uniform(0, 0.002))  # more or fewer gradients have arrived by now
                optimizer.step()
            if after is not None:
                after()
    return _everything(model, optimizer)


def _everything(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found: dict[str, Any] = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"state {index} {key}": value for key, value in state.items()}
    for index, group in enumerate(optimizer.param_groups):
        found |= {f"group {index} {key}": value for key, value in group.items() if isinstance(value, int | float)}
    return found | {f"its {key}": value for key, value in vars(optimizer).items() if isinstance(value, int | float)}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What is not equal bit for bit."""
    if one.keys() != other.keys():
        return sorted(one.keys() ^ other.keys())
    return [key for key in one if not _equal(one[key], other[key])]


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if torch.is_tensor(one) and torch.is_tensor(other) else one == other


def cell(name: str, schedule: str, reference: Result | None = None) -> str:
    """One cell of the matrix: "equal", "equal, waits", "refused", or what is wrong."""
    row = ROWS[name]
    found = train(row, SCHEDULES[schedule])
    if row.refused:
        return "refused" if re.search(row.refused, found.refused) else f"WRONG: not refused: {found.refused}"
    if found.refused:
        return f"WRONG: refused: {found.refused}"
    wanted = reference or train(row, "fusion")
    apart = [key for state in found.states[1:] for key in differences(found.states[0], state)]
    if apart:
        return f"WRONG: replicas differ in {', '.join(apart[:4])}"
    other = differences(found.states[0], wanted.states[0])
    if other:
        return f"WRONG: differs from fusion in {', '.join(other[:4])}"
    return "equal, waits" if found.warned else "equal"
