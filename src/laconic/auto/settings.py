"""The settings of `auto`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from laconic.auto.controller import Controller
from laconic.auto.planning import InChildProcess
from laconic.errors import AttachError, LaconicError, one_line, unknown_setting
from laconic.grammar import parse_text
from laconic.runtime import Session
from laconic.runtime.change import Chooser
from laconic.strategy import Strategy
from laconic.units import parse_quantity

_AUTO = re.compile(r"\s*auto\s*($|[(/+])")
_SETTINGS = ("max_loss_gap", "total_steps", "task")
_TASKS = ("text", "other")


@dataclass(frozen=True, kw_only=True)
class Auto(Chooser):
    """Choose the strategy during training: DDP's at first, then one that the planner predicts to be faster here.

    The first 30 steps run as DDP does; meanwhile the layers are timed and, once, the links. Then the planner ranks
    strategies that keep the optimizer as it is and update parameters in optimizer.step(). With max_loss_gap these may
    also let replicas train alone for some steps (local_sgd, the DiLoCo family); after the last of `total_steps` they
    become one model. A strategy that is not measured to be at least 2% faster than DDP is given up again. When steps
    become longer or shorter by a quarter, everything is measured and planned anew.
    """

    max_loss_gap: float | None = None
    """The largest share by which the loss may end above that of DDP at equal steps; None: only lossless strategies."""
    total_steps: int | None = None
    """Optimizer steps of the whole training; may also be given to attach()."""
    task: Literal["text", "other"] = "text"
    """What the model learns. Losses were measured with text, so for other tasks nothing lossy is chosen."""

    def __post_init__(self) -> None:
        gap = self.max_loss_gap
        if gap is not None and (isinstance(gap, bool) or not isinstance(gap, int | float) or not 0 <= gap <= 1):
            raise AttachError(f"auto.max_loss_gap must be a share from 0 to 1 such as 0.01, got {gap!r}.")
        if self.task not in _TASKS:
            raise AttachError(f'auto.task must be "text" or "other", got {one_line(repr(self.task), 40)}.')
        if gap is not None and self.task == "other":
            raise AttachError(
                'auto: max_loss_gap has no effect with task="other", for which no loss was measured. Leave one of them '
                "out."
            )

    def __str__(self) -> str:
        changed = {key: getattr(self, key) for key in _SETTINGS if getattr(self, key) != getattr(Auto, key)}
        inside = ", ".join(f"{key}={value}" for key, value in changed.items())
        return f"auto({inside})" if inside else "auto"

    def first(self, total_steps: int | None) -> Strategy:
        """DDP's strategy."""
        self._steps(total_steps)
        return Strategy()

    def begin(self, session: Session, total_steps: int | None) -> None:
        """Control every step from now on, unless there is only one rank."""
        if session.world_size > 1:
            steps = self._steps(total_steps)
            planner = InChildProcess(max_loss_gap=self.max_loss_gap, task=self.task, total_steps=steps)
            Controller(session, planner, steps).begin()

    def _steps(self, total_steps: int | None) -> int | None:
        """The total number of steps, if known; raises where it is required."""
        given = {steps for steps in (self.total_steps, total_steps) if steps is not None}
        if len(given) > 1:
            raise AttachError(f"total_steps is {self.total_steps} in auto and {total_steps} in attach(). Give it once.")
        steps = next(iter(given), None)
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise AttachError(f"total_steps must be a whole number >= 1, got {steps!r}.")
        if steps is None and self.max_loss_gap is not None:
            raise AttachError(
                "auto: what a strategy costs in loss depends on how long training is, so max_loss_gap needs "
                "total_steps. Give both: attach(model, optimizer, "
                f'"auto(max_loss_gap={self.max_loss_gap:g})", total_steps=N).'
            )
        return steps


def read_auto(strategy: object) -> object:
    """An Auto for the text "auto" or auto(...); any other strategy unchanged."""
    if not isinstance(strategy, str) or _AUTO.match(strategy) is None:
        return strategy
    axes = parse_text(strategy)
    if len(axes) > 1 or len(axes[0]) > 1:
        raise AttachError(
            f'"auto" chooses on every axis, so it cannot be combined with other methods. Write "auto" alone, got '
            f'"{one_line(strategy, 80)}".'
        )
    given: dict[str, object] = {}
    for key, value in axes[0][0].arguments:
        if key is None or key not in _SETTINGS:
            raise unknown_setting("strategy", "auto", str(key or value), _SETTINGS)
        if key in given:
            raise AttachError(f"auto.{key} is set twice.")
        given[key] = _value(key, str(value))
    return Auto(**given)  # type: ignore[arg-type]


def _value(key: str, text: str) -> object:
    if key == "task":
        return text.strip("\"'")
    where = f"auto.{key}"
    if key == "max_loss_gap":
        return parse_quantity(text, "share", where)
    try:
        return int(text)
    except ValueError:
        raise LaconicError(f"{where} must be a whole number, got {one_line(text, 40)}.") from None
