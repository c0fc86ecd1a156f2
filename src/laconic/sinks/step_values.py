"""From the events of a session to a few numbers per step.

    step_s           from the end of the previous step to the end of this one
    wait_s           training waits for communication
    encode_s         the communication thread compresses
    decode_s         the communication thread decompresses
    exchange_s       sum over buckets of the time from the first byte to the result; buckets overlap
    sent_bytes       payload this rank has sent
    residual_norm    of all buckets together, where error feedback keeps residuals
    relative_error   mean over buckets: the norm of what compression left out, relative to that of its input
    staleness        largest over buckets, where a strategy has no barrier
    dropped          1 if the gradient of the step arrived too late and was dropped, else 0 (backup)
    loss             where an event carries one

A number that no event of the step gives is left out: most strategies keep no residual, and residuals are measured in
some steps only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from laconic.core.event import Event

_OPEN_STEPS = 2
"""Steps held back for late events: a GPU lags behind the host, and some schedules exchange in the next forward pass."""
STEP_KINDS = ("step", "iteration")
"""Events that end a step: the session's own, or that of a loop that times itself, which takes precedence."""
_TIMES = ("wait", "encode", "decode", "exchange")
_COMBINED: dict[str, Callable[[Sequence[float]], float]] = {
    "residual_norm": lambda norms: math.hypot(*norms),
    "relative_error": lambda errors: sum(errors) / len(errors),
    "staleness": max,
    "dropped": max,
    "loss": lambda losses: losses[-1],
}


@dataclass(frozen=True)
class StepValues:
    """The numbers of one step on one rank."""

    rank: int
    step: int
    values: dict[str, float]


@dataclass
class _OpenStep:
    """The values of a step so far."""

    totals: dict[str, float] = field(default_factory=dict)
    measured: dict[str, list[float]] = field(default_factory=dict)

    def closed(self) -> dict[str, float]:
        return {**self.totals, **{name: _COMBINED[name](found) for name, found in self.measured.items()}}


class StepSums:
    """Adds events up, step by step; for the events of one rank."""

    def __init__(self) -> None:
        self._open: dict[int, _OpenStep] = {}
        self._rank = 0
        self._sent_bytes = 0
        self._last = -1
        """The last step that has been returned."""

    def add(self, event: Event) -> Iterator[StepValues]:
        """Take one event and return every step that is complete by now."""
        if event.kind == "attach" or (event.kind in STEP_KINDS and event.step <= self._last):
            # Another session, or one that has loaded an earlier state: steps are counted anew from here.
            yield from self.rest()
            self._last = event.step - 1
        if event.kind == "attach":
            self._sent_bytes = 0
        # A late event of a returned step is added to the earliest open step.
        step = max(event.step, self._last + 1)
        self._rank = event.rank
        found = self._open.setdefault(step, _OpenStep())
        if event.kind in _TIMES:
            found.totals[f"{event.kind}_s"] = found.totals.get(f"{event.kind}_s", 0.0) + event.duration_s
        for name in _COMBINED:
            value = event.data.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                found.measured.setdefault(name, []).append(float(value))
        if event.kind in STEP_KINDS:
            found.totals["step_s"] = event.duration_s
            sent_bytes = event.data.get("sent_bytes")
            if isinstance(sent_bytes, int):
                # A session counts from its beginning, a loop that times itself counts each step.
                before = self._sent_bytes if event.kind == "step" else 0
                found.totals["sent_bytes"] = sent_bytes - before
                self._sent_bytes = sent_bytes if event.kind == "step" else self._sent_bytes
            yield from self._close(until=event.step - _OPEN_STEPS)

    def rest(self) -> Iterator[StepValues]:
        """Return the steps that are still open, at the end of a run."""
        yield from self._close(until=max(self._open, default=-1))

    def _close(self, until: int) -> Iterator[StepValues]:
        for step in sorted(step for step in self._open if step <= until):
            values = self._open.pop(step).closed()
            self._last = step
            if values:
                yield StepValues(self._rank, step, values)
