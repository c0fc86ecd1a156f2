"""From the events of a contest to rows and curves.

    exposed = iteration - alone - optimizer - encode
        iteration   a whole training step                               } medians over
        alone       a forward and backward pass without communication   } the timed steps
        optimizer   the baseline's optimizer step, which communicates nothing
        encode      the time the step waited while its own communication thread encoded or decoded

Where most steps exchange nothing (local SGD and the like), a step's time and bytes are means instead of medians.
On a GPU a step's time is the wall clock of the turns without the first steps: the mean time by events in the
training stream, and a share of the work that was still in flight when a turn ended.
Rank 0's times are used. A contest that was cut short gives rows from the steps that it made.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from laconic.core.event import Event
from laconic.errors import StrategyError
from laconic.report.results import BASELINES, Curve, Links, Refused, Row, is_torchs_own
from laconic.strategy import Strategy

WARM_STEPS = 2
"""First steps, left out of the times: memory is allocated and the order of gradients is observed there."""
_MOST_POINTS = 1000


@dataclass
class Recording:
    """Rank 0's record of one strategy on one link."""

    strategy: str
    link: str
    iterations: list[Event] = field(default_factory=list)
    turns: list[Event] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)
    waits: dict[int, list[Event]] = field(default_factory=dict)
    """By step; several where layers wait one by one."""
    local_work: dict[int, list[Event]] = field(default_factory=dict)
    """Encoding and decoding, by step."""

    def take(self, event: Event) -> None:
        """Add one event."""
        if event.kind == "iteration":
            self.iterations.append(event)
        elif event.kind == "turn":
            self.turns.append(event)
        elif event.kind == "alone":
            self.alone_s.append(event.duration_s)
        elif event.kind == "optimizer" and event.step >= WARM_STEPS:
            self.optimizer_s.append(event.duration_s)
        elif event.kind == "wait":
            self.waits.setdefault(event.step, []).append(event)
        elif event.kind in ("encode", "decode"):
            self.local_work.setdefault(event.step, []).append(event)

    @property
    def losses(self) -> list[float]:
        """The loss of every step, NaN where it was not a number; empty where nothing is learnt."""
        found = [event.data.get("loss") for event in self.iterations]
        if all(loss is None for loss in found):
            return []
        return [float(loss) if isinstance(loss, int | float) else math.nan for loss in found]

    @property
    def seconds(self) -> list[float]:
        """Training time at the end of every step."""
        total, ends = 0.0, []
        for event in self.iterations:
            total += event.duration_s
            ends.append(total)
        return ends

    def per_step(self, key: str) -> list[int]:
        """The value of `key` of each turn, per step; empty if it was not counted."""
        return [
            round(value / int(turn.data["num_steps"] or 1))
            for turn in self.turns
            if isinstance(value := turn.data.get(key), int)
        ]

    def drained_s(self) -> float | None:
        """On a GPU, per step: the wall clock of turns beyond their steps, for work that outlasts them; else None."""
        walls_s = [turn.data.get("wall_s") for turn in self.turns]
        if not walls_s or not all(isinstance(wall_s, float) for wall_s in walls_s):
            return None
        num_steps = sum(int(turn.data["num_steps"] or 0) for turn in self.turns)
        of_turns = self.iterations[:num_steps]
        wall_s = sum(float(wall_s or 0.0) for wall_s in walls_s)
        return max(0.0, wall_s - sum(event.duration_s for event in of_turns)) / max(1, num_steps)

    def encode_s(self) -> float:
        """Median over steps of the waiting that was encoding and decoding."""
        shares = [
            sum(_overlap_s(wait, work) for wait in waits for work in self.local_work.get(step, []))
            for step, waits in self.waits.items()
            if step >= WARM_STEPS
        ]
        return statistics.median(shares) if shares else 0.0


def _overlap_s(one: Event, other: Event) -> float:
    begin = max(one.time_s, other.time_s)
    end = min(one.time_s + one.duration_s, other.time_s + other.duration_s)
    return max(0.0, end - begin)


def recordings(events: Iterable[Event], rank: int = 0) -> list[Recording]:
    """Sort events by link and strategy, in the order in which they first appear."""
    found: dict[tuple[str, str], Recording] = {}
    for event in events:
        strategy, link = event.data.get("strategy"), event.data.get("link")
        if event.rank == rank and isinstance(strategy, str) and isinstance(link, str):
            found.setdefault((link, strategy), Recording(strategy, link)).take(event)
    # A turn ends with its event, so iterations without one belong to a turn that was cut short: still steps done.
    return [recording for recording in found.values() if recording.iterations]


def refusals(events: Iterable[Event]) -> list[Refused]:
    """The strategies that could not be attached to the model."""
    return [
        Refused(strategy=strategy, name=strategy, link=str(event.data["link"]), reason=str(event.data["reason"]))
        for event in events
        if event.kind == "refused"
        for strategy in [str(event.data["strategy"])]
    ]


def tail_mean(losses: Sequence[float]) -> float | None:
    """The mean of the last tenth: a single batch is noise."""
    tail = losses[-max(1, len(losses) // 10) :]
    return _finite(sum(tail) / len(tail)) if tail else None


def _finite(loss: float) -> float | None:
    """None instead of values that JSON does not have."""
    return loss if math.isfinite(loss) else None


def default_target(found: Sequence[Recording]) -> float | None:
    """The baseline's loss after four fifths of its steps, on the first link, which all others have time to reach."""
    baseline = next((recording.losses for recording in found if recording.strategy in BASELINES), [])
    return tail_mean(baseline[: len(baseline) * 4 // 5])


def seconds_to(target: float, recording: Recording) -> float | None:
    """Training time until the loss, smoothed over a tenth of the steps, is at most `target`."""
    losses, seconds = recording.losses, recording.seconds
    window = max(1, len(losses) // 10)
    for end in range(window, len(losses) + 1):
        if sum(losses[end - window : end]) / window <= target:
            return seconds[end - 1]
    return None


def rows(
    found: Sequence[Recording], *, links: Links, target_loss: float | None, names: Mapping[str, str] | None = None
) -> list[Row]:
    """A row for each recording, the baseline first on every link; `names` gives short names to strategies."""
    result: list[Row] = []
    for link in dict.fromkeys(recording.link for recording in found):
        of_link = [recording for recording in found if recording.link == link]
        of_link.sort(key=lambda recording: recording.strategy not in BASELINES)
        baseline = of_link[0] if of_link[0].strategy in BASELINES else None
        equal_steps = min(len(recording.iterations) for recording in of_link)
        plain = [
            _row(recording, baseline, links=links, target_loss=target_loss, equal_steps=equal_steps)
            for recording in of_link
        ]
        result += [
            replace(
                row,
                name=(names or {}).get(row.strategy, row.strategy),
                speedup_over_ddp=plain[0].step_ms / row.step_ms if baseline is not None else None,
            )
            for row in plain
        ]
    return result


def _row(
    recording: Recording,
    baseline: Recording | None,
    *,
    links: Links,
    target_loss: float | None,
    equal_steps: int,
) -> Row:
    timed = [event.duration_s for event in recording.iterations]
    strategy = strategy_of(recording.strategy)
    rests = strategy is not None and strategy.synchronization.rounds_per_step() < 1
    warm = WARM_STEPS if strategy is None else max(WARM_STEPS, strategy.scheduling.settles_after)
    if rests and len(recording.turns) > 1:
        # The first round compiles kernels and takes memory, whenever it comes.
        warm = int(recording.turns[0].data["num_steps"] or 0)
    timed = timed[warm:] or timed
    low_s, step_s, high_s = statistics.quantiles(timed, n=4) if len(timed) > 1 else (timed[0],) * 3
    typical: Callable[[Sequence[float]], float] = statistics.median
    if rests:
        # Its few expensive steps are what it costs, and a median would not see them.
        typical = statistics.fmean
        step_s = typical(timed)
    if (drained_s := recording.drained_s()) is not None:
        step_s = statistics.fmean(timed) + drained_s
    optimizer_s = (baseline or recording).optimizer_s or [0.0]
    alone_s = statistics.median(recording.alone_s) if recording.alone_s else step_s
    waited_s = max(0.0, step_s - alone_s - statistics.median(optimizer_s))
    encode_s = min(recording.encode_s(), waited_s)
    kernel, counted = recording.per_step("kernel_bytes"), recording.per_step("counted_bytes")
    wire = kernel or counted
    return Row(
        strategy=recording.strategy,
        name=recording.strategy,
        link=recording.link,
        links=links,
        steps=len(recording.iterations),
        step_ms=step_s * 1e3,
        step_ms_low=low_s * 1e3,
        step_ms_high=high_s * 1e3,
        compute_ms=(step_s - waited_s) * 1e3,
        encode_ms=encode_s * 1e3,
        exposed_ms=(waited_s - encode_s) * 1e3,
        wire_bytes_per_step=round(typical(wire)) if wire else None,
        wire_bytes_source="kernel" if kernel else "transport" if counted else None,
        # The last turns, because the first step of all also agrees on the order of gradients.
        counted_bytes_per_step=counted[-1] if counted else None,
        predicted_bytes_per_step=_predicted(recording),
        final_loss=tail_mean(recording.losses),
        loss_at_equal_steps=tail_mean(recording.losses[:equal_steps]),
        seconds_to_target=None if target_loss is None else seconds_to(target_loss, recording),
        speedup_over_ddp=None,
    )


def strategy_of(name: str) -> Strategy | None:
    """The strategy of that text; None if it is torch's own or one that another version knew."""
    if is_torchs_own(name):
        return None
    try:
        return Strategy.parse(name)
    except StrategyError:
        return None


def _predicted(recording: Recording) -> int | None:
    said = [turn.data.get("predicted_bytes") for turn in recording.turns]
    return said[-1] if said and isinstance(said[-1], int) else None


def curve(recording: Recording) -> Curve:
    """The loss curve, thinned to the points that a figure can show."""
    sent: list[int] = []
    total = 0.0
    per_turn = recording.per_step("kernel_bytes") or recording.per_step("counted_bytes")
    if per_turn:
        for index, turn in enumerate(recording.turns):
            for _ in range(int(turn.data["num_steps"] or 0)):
                total += per_turn[index]
                sent.append(round(total))
    every = -(-len(recording.iterations) // _MOST_POINTS)
    kept = range(every - 1, len(recording.iterations), every) if every else range(0)
    losses, seconds = recording.losses, recording.seconds
    return Curve(
        strategy=recording.strategy,
        link=recording.link,
        step=[index + 1 for index in kept],
        loss=[_finite(losses[index]) for index in kept] if losses else [],
        seconds=[seconds[index] for index in kept],
        wire_bytes=[sent[index] for index in kept] if len(sent) == len(recording.iterations) else [],
    )
