"""One offline HTML page about a plan: the verdict, the map of bandwidths and workers, and time against loss.

The data of its figures:

strategies  [{"text", "name", "colour", "symbol"}]
cells       [{"strategy", "bps", "rate", "workers", "sooner"}]     the best one there
points      [{"strategy", "seconds", "low_s", "high_s", "gap", "gap_low", "gap_high", "frontier", "why"}]
here        {"bps", "workers"}                                     what was asked about
inside      bool                                                   whether bandwidths are those inside one host
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from laconic.planner import Answer, Choice
from laconic.planner.crossovers import BandwidthRange, Cell
from laconic.planner.question import rated_bps
from laconic.planner.words import choice_name, grounds, loss_in_words, ranges_in_words, reasons, verdict
from laconic.report.ink import Ink, looks
from laconic.report.standalone_html import render_page
from laconic.units import human_bytes, human_duration, human_rate, human_seconds

_MOST_POINTS = 14
"""Strategies in the figure of time against loss."""


def render(answer: Answer, bands: Sequence[BandwidthRange], cells: Sequence[Cell]) -> str:
    """The page as text."""
    shown = _shown(answer)
    names = {_text(choice): choice_name(choice) for choice in [*shown, *(cell.choice for cell in cells)]}
    inks = looks(names, _text(answer.baseline))
    question = answer.question
    values = {
        "title": f"A plan for {question.workload.name}",
        "verdict": verdict(answer),
        "answer": answer,
        "cluster": question.setting.cluster.describe(),
        "inks": list(inks.values()),
        "lines": [(choice, inks[_text(choice)]) for choice in shown],
        "best": [(choice_name(choice), reasons(choice, answer)) for choice in answer.top],
        "bands": ranges_in_words(bands, inside=question.is_one_host),
        "unknown": [(choice_name(choice), choice.step_s, choice.reason) for choice in answer.unknown],
        "grounds": grounds(answer),
        "has_map": len(cells) > 1,
    }
    filters = {"bytes": human_bytes, "seconds": human_seconds, "duration": human_duration}
    return render_page("plan_page", _document(answer, shown, cells, inks), filters, values)


def _shown(answer: Answer) -> list[Choice]:
    """The best of each kind that may be used, and the baseline."""
    kinds: dict[str, Choice] = {}
    for choice in answer.ranked:
        kinds.setdefault(_text(choice).rpartition(" / ")[0], choice)
    found = list(kinds.values())[:_MOST_POINTS]
    return found if any(choice is answer.baseline for choice in found) else [*found, answer.baseline]


def _text(choice: Choice) -> str:
    """What sets a choice apart from others."""
    return f"{'islands: ' if choice.islands else ''}{choice.strategy}"


def _document(
    answer: Answer, shown: Sequence[Choice], cells: Sequence[Cell], inks: Mapping[str, Ink]
) -> dict[str, object]:
    place = {text: number for number, text in enumerate(inks)}
    question = answer.question
    return {
        "strategies": [asdict(ink) for ink in inks.values()],
        "cells": [
            {
                "strategy": place[_text(cell.choice)],
                "bps": cell.bandwidth_bps,
                "rate": human_rate(cell.bandwidth_bps),
                "workers": cell.workers,
                "sooner": cell.sooner,
            }
            for cell in cells
        ],
        "points": [_point(choice, shown, place[_text(choice)]) for choice in shown],
        "here": {
            "bps": rated_bps(question.setting, inside=question.is_one_host),
            "workers": question.setting.workers,
        },
        "inside": question.is_one_host,
    }


def _point(choice: Choice, shown: Sequence[Choice], strategy: int) -> dict[str, object]:
    loss = choice.loss
    assert loss is not None, "what is ranked has a known loss"
    return {
        "strategy": strategy,
        "seconds": choice.seconds,
        "low_s": choice.seconds_low,
        "high_s": choice.seconds_high,
        "gap": loss.gap,
        "gap_low": loss.gap_low,
        "gap_high": loss.gap_high,
        "frontier": not any(_beats(other, choice) for other in shown),
        "why": loss_in_words(choice),
    }


def _beats(other: Choice, choice: Choice) -> bool:
    """Whether it is sooner and costs no more loss."""
    assert other.loss is not None
    assert choice.loss is not None
    return other.seconds < choice.seconds and other.loss.gap <= choice.loss.gap
