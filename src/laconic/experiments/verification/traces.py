"""After detach() nothing is left: no hook, thread, open file or key in a state, and gradients are plain tensors."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from laconic.experiments.verification.outcome import Outcome, failed, passed
from laconic.experiments.verification.stage import Stage
from laconic.experiments.verification.trainee import Trainee
from laconic.strategy import Strategy

_STEPS = 2
_SETTLE_S = 10.0
"""How long threads may take to end, and sockets to close."""
_DESCRIPTORS = Path("/proc/self/fd")
_LOOKING = threading.Lock()
"""A lock: the check itself opens a file, which other ranks in this process would count."""


def check(stage: Stage, strategy: Strategy) -> Outcome:
    """Compare hooks, threads, open files and states before attach() with those after detach()."""
    trainee = Trainee(stage, strategy)
    trainee.held_out_loss()  # in its first pass FSDP adds hooks of its own to a model
    hooks, keys = _hooks(trainee), _keys(trainee)
    _visit(stage, trainee)
    problem = _left_on(trainee, hooks, keys) or _left_in_training(stage, trainee)
    if any(stage.gather(problem)):
        return _told(stage, problem, "")
    # Only now: files and modules that are opened once and kept do not count.
    before = _Held.now(stage)
    _visit(stage, trainee)
    after = _Held.once_settled(stage, before)
    problem = _left_on(trainee, hooks, keys) or before.problem_with(after)
    counted = f"{after.num_threads} threads" + (f" and {after.num_files} open files" if after.num_files else "")
    return _told(stage, problem, f"no hook left, {counted} as before, states and gradients ordinary, attached twice")


def _told(stage: Stage, problem: str | None, else_words: str) -> Outcome:
    found = ((rank, told) for rank, told in enumerate(stage.gather(problem)) if told is not None)
    rank, told = next(found, (None, None))
    return passed(else_words) if told is None else failed(f"on rank {rank} {told}")


def _visit(stage: Stage, trainee: Trainee) -> None:
    """Attach, train, detach."""
    with trainee.attach():
        trainee.train(range(_STEPS))
        stage.meet()


@dataclass(frozen=True)
class _Held:
    """The threads and files of a process."""

    threads: tuple[str, ...]
    num_files: int | None
    """None where the system does not report it."""

    @property
    def num_threads(self) -> int:
        return len(self.threads)

    @classmethod
    def now(cls, stage: Stage, generation: int = 1) -> _Held:
        # Where ranks are threads, they share threads and files: count while none of them is active.
        stage.meet()
        if not stage.in_process or stage.rank == 0:
            gc.collect(generation)  # garbage does not count
        stage.meet()
        with _LOOKING:
            files = len(list(_DESCRIPTORS.iterdir())) if _DESCRIPTORS.exists() else None
        found = cls(tuple(thread.name for thread in threading.enumerate()), files)
        stage.meet()
        return found

    @classmethod
    def once_settled(cls, stage: Stage, before: _Held) -> _Held:
        """Return as soon as the counts are as before, or after a while."""
        deadline_s = time.monotonic() + _SETTLE_S
        generation = 1
        while True:
            found = cls.now(stage, generation)
            settled = before.problem_with(found) is None or time.monotonic() > deadline_s
            if all(stage.gather(settled)):
                return found
            # A full collection this time, which takes long.
            generation = 2
            time.sleep(0.02)

    def problem_with(self, later: _Held) -> str | None:
        left = list(later.threads)
        for name in self.threads:
            if name in left:
                left.remove(name)
        if later.num_threads > self.num_threads:
            return f"{later.num_threads - self.num_threads} threads are left, among them {', '.join(left[:2])}"
        if self.num_files is not None and later.num_files is not None and later.num_files > self.num_files:
            return f"{later.num_files - self.num_files} more files are open than before"
        return None


def _hooks(trainee: Trainee) -> dict[str, int]:
    """The number of hooks on the model, on its parameters and on the optimizer."""
    owners: dict[str, object] = {"the optimizer": trainee.optimizer}
    owners |= {f"parameter {name}": parameter for name, parameter in trainee.model.named_parameters()}
    owners |= {f"module {name or 'itself'}": module for name, module in trainee.model.named_modules()}
    names = (
        *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_state_dict_pre_hooks"),
        *("_backward_hooks", "_post_accumulate_grad_hooks"),
        *("_forward_hooks", "_forward_pre_hooks", "_backward_pre_hooks", "_state_dict_pre_hooks", "_state_dict_hooks"),
    )
    return {owner: sum(len(getattr(held, name, None) or ()) for name in names) for owner, held in owners.items()}


def _keys(trainee: Trainee) -> list[list[str]]:
    """The keys of the model's state, and of the settings of the optimizer's groups."""
    groups: list[dict[str, object]] = trainee.optimizer.state_dict()["param_groups"]
    return [list(trainee.model.state_dict()), *[sorted(group) for group in groups]]


def _left_on(trainee: Trainee, hooks: dict[str, int], keys: list[list[str]]) -> str | None:
    """The differences on the model and the optimizer, in words."""
    for owner, count in _hooks(trainee).items():
        if count != hooks[owner]:
            return f"{owner} has {count} hooks, {hooks[owner]} before"
    if _keys(trainee) != keys:
        return "the state of model or optimizer has other keys than before"
    for name, parameter in trainee.model.named_parameters():
        if not isinstance(parameter, nn.Parameter) or parameter._base is not None:
            return f"parameter {name} is no longer a parameter of its own"
        if parameter.grad is not None and parameter.grad._base is not None:
            return f"the gradient of {name} is still a view of an exchange buffer"
    return None


def _left_in_training(stage: Stage, trainee: Trainee) -> str | None:
    """Problems when training continues without laconic, in words."""
    before = trainee.flat()
    trainee.train([_STEPS])
    if bool((trainee.flat() == before).all()):
        return "a step without laconic changes nothing"
    twin = Trainee(stage, trainee.strategy)
    twin.train([_STEPS])
    kept, usual = trainee.optimizer.state_dict()["state"], twin.optimizer.state_dict()["state"]
    if {key: sorted(fields) for key, fields in kept.items()} != {key: sorted(usual[key]) for key in usual}:
        return "the optimizer's state has other fields than without laconic"
    return None
