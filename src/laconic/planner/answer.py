"""The search and its result: the strategies in order of time to torch DDP's loss, and the one to use.

First one strategy of each kind is simulated, then the best few with other schedules and buckets. Of strategies that are
predicted to differ by less than CLOSE the simplest is taken: torch DDP itself, then a lossless one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from laconic.errors import UsageError
from laconic.planner.candidates import DDP, FSDP, first_candidates, other_forms, short_name
from laconic.planner.choice import Choice, Judge
from laconic.planner.islands import as_islands, between_islands
from laconic.planner.question import Question
from laconic.strategy import Strategy
from laconic.units import human_bytes

CLOSE = 0.02
"""Times that differ by less are the same: half of all predictions are off by more than 1.2%."""
_HOPELESS = 2.0
"""A strategy that takes this many times as long as the best one so far, even with free communication, is not
simulated."""
_REFINED = 4
"""Strategies that are refined."""
BEST = 3
"""The number of strategies that the answer describes in full."""

Progress = Callable[[int, int, str], None]
"""Gets the number of finished simulations, their total, and their kind."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of a search."""

    question: Question
    baseline: Choice
    """Torch DDP, or FSDP2 where DDP does not fit into memory."""
    choices: tuple[Choice, ...]
    """All strategies that can run, in order of time to the baseline's loss."""
    refused: tuple[tuple[str, str], ...]
    """Strategies that cannot run, each with the reason."""
    hopeless: tuple[str, ...] = ()
    """Strategies that were not simulated: even with free communication, others would reach the loss much sooner."""

    @property
    def ranked(self) -> list[Choice]:
        """Strategies within the limits whose loss is known well enough; the one to use comes first."""
        found = [choice for choice in self.choices if choice.standing == "ranked"]
        close = [choice for choice in found if choice.seconds <= (1 + CLOSE) * found[0].seconds]
        best = min(close, key=self._simplicity)
        return [best, *(choice for choice in found if choice is not best)]

    @property
    def best(self) -> Choice:
        """The one to use; it exists, because the baseline is within all limits."""
        return self.ranked[0]

    @property
    def top(self) -> list[Choice]:
        """The best few; of strategies that differ only in schedule and settings, the best one."""
        found: dict[str, Choice] = {}
        for choice in self.ranked:
            found.setdefault(re.sub(r"\(.*?\)", "", _kind(choice)), choice)
        return list(found.values())[:BEST]

    @property
    def unknown(self) -> list[Choice]:
        """Strategies whose loss is not known well enough, the fastest step first."""
        return sorted((one for one in self.choices if one.standing == "unknown"), key=lambda one: one.step_s)

    def sooner(self, choice: Choice) -> tuple[float, float, float]:
        """The speed-up over the baseline in time to the baseline's loss, and its range.

        Errors of both predictions have the same sign where both wait for the same links, so only the range of the steps
        counts.
        """
        times, loss = self.baseline.seconds / choice.seconds, choice.loss
        if loss is None:
            return times, times, times
        return times, times * loss.ratio / loss.ratio_high, times * loss.ratio / loss.ratio_low

    def _simplicity(self, choice: Choice) -> tuple[int, float, float]:
        """A key that orders strategies from simple to complex."""
        kind = 0 if choice is self.baseline else 1 if choice.loses_nothing and not choice.islands else 2
        return kind, 0.0 if choice.loss is None else choice.loss.gap, choice.seconds


def answer(
    question: Question,
    progress: Progress | None = None,
    *,
    among: Sequence[Strategy] | None = None,
    shard: bool = True,
) -> Answer:
    """Search; raises UsageError if nothing fits.

    among: only these, unchanged, and torch DDP and FSDP2. shard: whether FSDP2 is considered.
    """
    judge, tell = Judge(question), progress or _silent
    candidates = first_candidates(question) if among is None else among
    total = len(candidates) + (0 if among is not None else _REFINED * len(other_forms(DDP, question)))
    found: dict[str, Choice] = {}
    refused: dict[str, str] = {}
    hopeless: list[str] = []
    done, best_s = 0, math.inf

    def look(strategies: Sequence[Strategy]) -> None:
        nonlocal done, best_s
        for strategy in strategies:
            done += 1
            text = str(strategy)
            if text in found or text in refused:
                continue
            tell(min(done, total), total, "strategies")
            if judge.least_s(strategy) > _HOPELESS * best_s:
                hopeless.append(text)
                continue
            made = judge.choice(strategy)
            if isinstance(made, str):
                refused[text] = made
                continue
            found[text] = made
            if made.standing == "ranked":
                best_s = min(best_s, made.seconds)

    look([DDP, FSDP] if shard else [DDP])
    baseline = _baseline(found, refused, question)
    look(candidates)
    if among is None and (hosts := as_islands(question)) is not None:
        found |= {f"islands: {choice.strategy}": choice for choice in between_islands(hosts)}
    for choice in [one for one in _in_order(found) if not one.islands][: _REFINED if among is None else 0]:
        look(other_forms(choice.strategy, question))
    tell(total, total, "strategies")
    return Answer(
        question=question,
        baseline=baseline,
        choices=tuple(sorted(found.values(), key=lambda choice: choice.seconds)),
        refused=tuple(refused.items()),
        hopeless=tuple(hopeless),
    )


def _silent(done: int, total: int, what: str) -> None:
    """Ignore progress."""


def _kind(choice: Choice) -> str:
    """The strategy without its schedule."""
    return ("islands: " if choice.islands else "") + str(choice.strategy).rpartition(" / ")[0]


def _in_order(found: dict[str, Choice]) -> list[Choice]:
    """The best of each kind among the possible answers."""
    kinds: dict[str, Choice] = {}
    for choice in sorted(found.values(), key=lambda choice: choice.seconds):
        if choice.standing == "ranked":
            kinds.setdefault(_kind(choice), choice)
    return list(kinds.values())


def _baseline(found: dict[str, Choice], refused: dict[str, str], question: Question) -> Choice:
    """Torch DDP if it fits, else FSDP2; raises if neither does."""
    plain, sharded = (found.get(str(strategy)) for strategy in (DDP, FSDP))
    if plain is None:
        raise UsageError(f"not even torch DDP can be simulated there: {refused[str(DDP)]}")
    memory_bytes = question.limits.memory_bytes
    if memory_bytes is None or plain.memory.total <= memory_bytes:
        return plain
    if sharded is not None and sharded.memory.total <= memory_bytes:
        return sharded
    nearest = min(found.values(), key=lambda choice: choice.memory.total)
    raise UsageError(
        f"no strategy fits into {human_bytes(memory_bytes)} of memory per rank; {short_name(nearest.strategy)} needs "
        f"the least, {human_bytes(nearest.memory.total)}, for weights, gradients, AdamW's moments and state. Use more "
        "workers, or GPUs with more memory (--device, --memory)."
    )
