"""What a case is, and how it is run with DDP and with laconic and compared.

A case is a model and the body of its loop, written once. It runs with torch's DDP and with laconic on the same ranks
from the same seeds; after every step parameters, gradients with their strides, buffers and the optimizer's state must
be equal bit for bit - or laconic must refuse with the words the case names, or differ by rounding where it says why.

    @case(model=mlp)
    def gradients_clipped(turn):
        turn.optimizer.zero_grad()
        turn.call(turn.data(4, 5)).square().mean().backward()
        nn.utils.clip_grad_norm_(turn.model.parameters(), 0.01)
        turn.optimizer.step()
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.errors import LaconicError

TIMEOUT_S = 10.0
_ROUNDING = 1e-4
"""Largest difference that still counts as rounding, relative to the largest entry of a tensor."""


@dataclass(frozen=True)
class Expected:
    """What must come of a case."""

    kind: str
    """equal, refused, rounding or right (DDP itself raises: compared with gradients averaged by hand)."""
    why: str = ""
    """refused: a pattern that its message matches; else the reason."""
    from_ranks: int = 2
    """rounding: equal below this number of ranks."""


EQUAL = Expected("equal")


def refused(pattern: str) -> Expected:
    """laconic raises a LaconicError whose message matches."""
    return Expected("refused", pattern)


def rounding(because: str, *, from_ranks: int = 3) -> Expected:
    """Sums are formed in another order than DDP's. Two numbers have only one sum, so 2 ranks are always equal."""
    return Expected("rounding", because, from_ranks)


def right(because: str) -> Expected:
    """DDP raises; laconic does what averaging by hand does."""
    return Expected("right", because)


UNUSED = EQUAL
"""What is expected where DDP needs find_unused_parameters=True."""


@dataclass
class Wrapped:
    """A model that DDP or laconic synchronizes."""

    call: nn.Module
    """What the loop calls: the DDP module, or the model itself."""
    model: nn.Module
    optimizer: torch.optim.Optimizer
    no_sync: Callable[[], AbstractContextManager[object]]


@dataclass
class World:
    """One run of a case."""

    kind: str
    """ddp, laconic or hand."""
    stack: ExitStack
    rank: int = field(default_factory=dist.get_rank)
    size: int = field(default_factory=dist.get_world_size)
    looks: list[dict[str, Any]] = field(default_factory=list)

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, **ddp: Any) -> Wrapped:
        """Have gradients averaged from now on; `ddp` are arguments of DistributedDataParallel."""
        if self.kind == "ddp":
            wrapper = DistributedDataParallel(model, **ddp)
            return Wrapped(wrapper, model, optimizer, wrapper.no_sync)
        if self.kind == "hand":
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, 0)
            optimizer.register_step_pre_hook(lambda *_: _average_by_hand(model))
            return Wrapped(model, model, optimizer, ExitStack)
        session = laconic.attach(
            model,
            optimizer,
            f"bsp / all_reduce / none / fusion({int(ddp.get('bucket_cap_mb', 25) * 2**20)}B)",
            process_group=ddp.get("process_group"),
            # Unused parameters are found unless DDP's default says otherwise; True asks for DDP's order of sums.
            find_unused_parameters=ddp.get("find_unused_parameters") or None,
            timeout_s=TIMEOUT_S,
        )
        self.stack.enter_context(session)
        return Wrapped(model, model, optimizer, session.accumulate)

    def look(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Remember everything there is after a step."""
        seen: dict[str, Any] = {}
        for name, parameter in model.named_parameters():
            seen[f"parameter {name}"] = parameter.detach().clone()
            gradient = parameter.grad
            seen[f"gradient {name}"] = None if gradient is None else gradient.detach().clone()
            seen[f"gradient stride {name}"] = None if gradient is None else gradient.stride()
        for name, buffer in model.named_buffers():
            seen[f"buffer {name}"] = buffer.detach().clone()
        for index, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                seen[f"optimizer {index} {key}"] = value.clone() if torch.is_tensor(value) else value
        self.looks.append(seen)


@dataclass
class Turn:
    """What the body of a loop sees."""

    world: World
    wrapped: Wrapped
    step: int = 0
    memory: dict[str, Any] = field(default_factory=dict)
    """For a body that remembers something from step to step."""
    _drawn: int = 0

    @property
    def call(self) -> nn.Module:
        """What the loop calls."""
        return self.wrapped.call

    @property
    def model(self) -> Any:
        """The model itself."""
        return self.wrapped.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return self.wrapped.optimizer

    @property
    def rank(self) -> int:
        """This rank."""
        return self.world.rank

    def no_sync(self) -> AbstractContextManager[object]:
        """DDP's no_sync, or session.accumulate()."""
        return self.wrapped.no_sync()

    def data(self, *shape: int) -> torch.Tensor:
        """Different on every rank, in every step and in every call."""
        self._drawn += 1
        seed = 10000 * self._drawn + 100 * self.step + self.rank
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    def learn(self, loss: torch.Tensor) -> None:
        """The rest of an ordinary step; gradients stay to be looked at."""
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


Body = Callable[[Turn], None]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Case:
    """A case by name."""

    name: str
    run: Callable[[World], None]
    expected: Expected
    ranks: tuple[int, ...]


CASES: dict[str, Case] = {}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Momentum and weight decay, so that state and parameters matter."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def whole_run(*, expected: Expected = EQUAL, ranks: tuple[int, ...] = (2, 3, 4)) -> Callable[[Any], Any]:
    """A case that wraps and looks itself: a function of a World."""

    def add(run: Callable[[World], None]) -> Callable[[World], None]:
        name = run.__name__
        assert name not in CASES, name
        CASES[name] = Case(name, run, expected, ranks)
        return run

    return add


def case(
    *,
    model: Callable[[], nn.Module],
    optimizer: MakeOptimizer = sgd,
    steps: int = 4,
    expected: Expected = EQUAL,
    ranks: tuple[int, ...] = (2, 3, 4),
    before: Callable[[nn.Module], object] | None = None,
    after: Callable[[Turn], object] | None = None,
    **ddp: Any,
) -> Callable[[Body], Body]:
    """A case of one model and a body for each step.

    before, after: called once before and after the model is wrapped.
    ddp: arguments of DistributedDataParallel.
    """

    def add(body: Body) -> Body:
        def run(world: World) -> None:
            torch.manual_seed(world.rank)  # ranks start from different values
            made = model()
            if before is not None:
                before(made)
            turn = Turn(world, world.wrap(made, optimizer(made), **ddp))
            if after is not None:
                after(turn)
            for step in range(steps):
                turn.step, turn._drawn = step, 0
                body(turn)
                world.look(turn.model, turn.optimizer)

        run.__name__ = body.__name__
        whole_run(expected=expected, ranks=ranks)(run)
        return body

    return add


def _average_by_hand(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                mean = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / dist.get_world_size()
                dist.all_reduce(mean)
                if parameter.grad is not None or mean.any():
                    parameter.grad = mean


# -- running and comparing -----------------------------------------------------------------------------------------


def _looks(case: Case, kind: str) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        world = World(kind, stack)
        case.run(world)
        return world.looks


def compare(name: str) -> str:
    """Run one case both ways on these ranks: "equal", "refused: ...", "rounding: ...", or what is wrong."""
    case = CASES[name]
    try:
        found = _looks(case, "laconic")
    except LaconicError as exc:
        return f"refused: {type(exc).__name__}: {exc}"
    if case.expected.kind == "refused":
        return "wrong: not refused"
    wanted = _looks(case, "hand" if case.expected.kind == "right" else "ddp")
    if len(found) != len(wanted):
        return f"wrong: {len(found)} steps with laconic, {len(wanted)} with DDP"
    largest = 0.0
    for step, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        if ours.keys() != theirs.keys():
            return f"wrong: step {step}: only one has {sorted(ours.keys() ^ theirs.keys())}"
        for key in theirs:
            difference = _difference(ours[key], theirs[key])
            if isinstance(difference, str):
                return f"wrong: step {step}: {key}: {difference}"
            if difference > _ROUNDING:
                return f"wrong: step {step}: {key} differs by {difference:.3g} of its largest entry"
            largest = max(largest, difference)
    return "equal" if largest == 0 else f"rounding: {largest:.1g}"


def _difference(ours: Any, theirs: Any) -> float | str:
    """0 if equal bit for bit, the relative difference of two tensors, or words."""
    if not (torch.is_tensor(ours) and torch.is_tensor(theirs)):
        return 0.0 if ours == theirs else f"laconic {ours}, DDP {theirs}"
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return f"laconic {tuple(ours.shape)} {ours.dtype}, DDP {tuple(theirs.shape)} {theirs.dtype}"
    unknown = ours.isnan()
    if not torch.equal(unknown, theirs.isnan()):
        return "one has NaN where the other has not"
    ours, theirs = ours[~unknown], theirs[~unknown]
    if torch.equal(ours, theirs):
        return 0.0
    wide = torch.complex128 if ours.is_complex() else torch.float64
    ours, theirs = ours.to(wide), theirs.to(wide)
    return float((ours - theirs).abs().max()) / (float(theirs.abs().max()) or 1.0)


def verdict(name: str, ranks: list[str]) -> str:
    """equal, rounding, refused, right - or WRONG."""
    expected = CASES[name].expected
    if expected.kind == "refused":
        said = all(text.startswith("refused: ") and re.search(expected.why, text) for text in ranks)
        return "refused" if said else "WRONG"
    kinds = {text.partition(":")[0] for text in ranks}
    if expected.kind == "right":
        return "right" if kinds <= {"equal", "rounding"} else "WRONG"
    if kinds == {"equal"}:
        return "equal"
    may_round = expected.kind == "rounding" and len(ranks) >= expected.from_ranks
    return "rounding" if may_round and kinds <= {"equal", "rounding"} else "WRONG"
