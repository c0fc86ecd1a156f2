"""One sentence per link: which strategy to use there, and what it costs in accuracy."""

from __future__ import annotations

from collections.abc import Sequence

from laconic.report.results import NO_COMMUNICATION, TORCH_DDP, Row

_WORTH_IT = 1.03
"""Below this speed-up the noise of one run says nothing."""
_SAME_LOSS = 0.02
"""Strategies whose loss at equal steps is at most this much above torch DDP's count as training the same."""


def advise(rows: Sequence[Row]) -> list[str]:
    """A sentence for every link that has torch DDP beside something else."""
    sentences: list[str] = []
    for link in dict.fromkeys(row.link for row in rows):
        of_link = [row for row in rows if row.link == link]
        choices = [row for row in of_link if row.strategy not in (TORCH_DDP, NO_COMMUNICATION)]
        others = [row for row in choices if row.speedup_over_ddp is not None]
        baseline = next((row for row in of_link if row.strategy == TORCH_DDP), None)
        if baseline is not None and others:
            sentences.append(_sentence(baseline, others))
    return sentences


def _sentence(baseline: Row, others: Sequence[Row]) -> str:
    where = "Without a bandwidth limit" if baseline.links == "unlimited" else f"On {baseline.link} links"
    same = [row for row in others if (_loss_change(row, baseline) or 0.0) <= _SAME_LOSS]
    best = min(same, key=_milliseconds, default=None)
    if best is None or _speedup(best) < _WORTH_IT:
        sentence = f"{where} nothing that trains the same is clearly faster than torch DDP ({baseline.step_ms:.0f} ms)"
    else:
        sentence = (
            f"{where} use {best.name}: {_speedup(best):.2f}x as fast per step as torch DDP{_cost(best, baseline)}"
        )
    fastest = min(others, key=_milliseconds)
    if fastest is not best and _speedup(fastest) >= _WORTH_IT and fastest not in same:
        sentence += f"; {fastest.name} is {_speedup(fastest):.2f}x as fast{_cost(fastest, baseline)}"
    return f"{sentence}."


def _milliseconds(row: Row) -> float:
    return row.step_ms


def _speedup(row: Row) -> float:
    return row.speedup_over_ddp or 0.0


def _loss_change(row: Row, baseline: Row) -> float | None:
    if row.loss_at_equal_steps is None or not baseline.loss_at_equal_steps:
        return None
    return row.loss_at_equal_steps / baseline.loss_at_equal_steps - 1


def _cost(row: Row, baseline: Row) -> str:
    change = _loss_change(row, baseline)
    if change is None:
        return ""
    steps = f"after {min(row.steps, baseline.steps)} steps"
    return f", at the same loss {steps}" if abs(change) < 5e-4 else f", with the loss {change:+.1%} {steps}"
