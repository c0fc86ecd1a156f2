"""One sentence per link: which strategy reaches torch DDP's loss sooner, and which sends the fewest bytes for it.

A contest of a few steps measures how long a step takes, not how much it lowers the loss: 20 steps cannot rank losses.
The number of steps that a strategy needs to reach torch DDP's loss is taken from long runs (losses/steps_needed.py),
where there are any. These runs trained GPTs on text; for anything else the number is known only for strategies that
compute what DDP computes. Runs with larger models than the one that trains here do not count.

Named is the strategy whose range begins highest: the one that is surely sooner, not the one that may be soonest. Ranges
of strategies that change the loss are wide, so the figures within them rank strategies by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laconic.losses.steps_needed import SAME, StepsNeeded, steps_needed
from laconic.report.results import BASELINES, Row, is_torchs_own
from laconic.strategy import Strategy

_WORTH_IT = 1.03
"""Smaller differences are within the noise of one run."""
_FEWER = 1.1
"""The least saving of bytes that is mentioned."""


def advise(rows: Sequence[Row], *, gpt_parameters: int | None) -> list[str]:
    """A sentence for every link with torch DDP and other strategies.

    gpt_parameters: the size of the GPT that learns from text; None: the work is another.
    """
    sentences: list[str] = []
    for link in dict.fromkeys(row.link for row in rows):
        of_link = [row for row in rows if row.link == link]
        others = [row for row in of_link if not is_torchs_own(row.strategy)]
        baseline = next((row for row in of_link if row.strategy in BASELINES), None)
        if baseline is not None and others:
            sentences.append(_sentence(baseline, others, gpt_parameters))
    return sentences


@dataclass(frozen=True, kw_only=True)
class _Sooner:
    """How much sooner a strategy reaches torch DDP's final loss."""

    row: Row
    needed: StepsNeeded
    times: float
    low: float
    high: float

    @classmethod
    def of(cls, row: Row, baseline: Row, needed: StepsNeeded) -> _Sooner:
        """The range combines the quartiles of the step times with the range of the steps needed."""
        return cls(
            row=row,
            needed=needed,
            times=baseline.step_ms / (row.step_ms * needed.likely),
            low=baseline.step_ms_low / (row.step_ms_high * needed.high),
            high=baseline.step_ms_high / (row.step_ms_low * needed.low),
        )


def _sentence(baseline: Row, others: Sequence[Row], gpt_parameters: int | None) -> str:
    native = baseline.strategy
    where = "Without a bandwidth limit" if baseline.links == "unlimited" else f"On {baseline.link} links"
    known = [_Sooner.of(row, baseline, needed) for row in others if (needed := _known(row, gpt_parameters)) is not None]
    clear = [sooner for sooner in known if sooner.low >= _WORTH_IT]
    best = max(clear, key=lambda sooner: sooner.low, default=None)
    if best is None:
        sentence = f"{where} no strategy here is known to reach {native}'s loss clearly sooner than {native} itself"
    else:
        sentence = (
            f"{where} {best.row.name} reaches {native}'s loss {best.times:.1f} times sooner "
            f"({best.low:.1f} to {best.high:.1f})"
        )
        least = _least([sooner.row for sooner in clear if sooner.needed.likely <= 1.0], baseline)
        if least is not None and least[1] >= _FEWER:
            who = " and" if least[0] is best.row else f", {least[0].name}"
            sentence += f"{who} sends {least[1]:.1f} times fewer bytes at the same loss"
    fastest = min(others, key=lambda row: row.step_ms)
    if best is None or fastest is not best.row:
        sentence += _about_fastest(fastest, baseline, next((s for s in known if s.row is fastest), None))
    return f"{sentence}."


def _known(row: Row, gpt_parameters: int | None) -> StepsNeeded | None:
    """The steps that a strategy needs, if they were measured for the whole strategy and with work of this kind."""
    strategy = Strategy.parse(row.strategy)
    needed = steps_needed(strategy) if gpt_parameters is None else steps_needed(strategy, gpt_parameters)
    if needed is SAME:
        return needed
    return None if gpt_parameters is None or needed is None or needed.is_product else needed


def _least(rows: Sequence[Row], baseline: Row) -> tuple[Row, float] | None:
    """The row that sends the fewest bytes, and how many times fewer than torch DDP."""
    counted = [(row, row.wire_bytes_per_step) for row in rows if row.wire_bytes_per_step]
    if not counted or not baseline.wire_bytes_per_step:
        return None
    row, sent = min(counted, key=lambda pair: pair[1])
    return row, baseline.wire_bytes_per_step / sent


def _about_fastest(row: Row, baseline: Row, sooner: _Sooner | None) -> str:
    """A remark about the fastest step, if it is not the recommended strategy's."""
    speedup = baseline.step_ms / row.step_ms
    if speedup < _WORTH_IT:
        return ""
    if sooner is None:
        return f"; {row.name} is {speedup:.1f}x as fast per step, and how many steps it needs was not measured"
    needed = sooner.needed
    steps = f"{needed.low:.1f} to {needed.high:.1f} times the steps"
    return f"; {row.name} is {speedup:.1f}x as fast per step and needs {steps}"
