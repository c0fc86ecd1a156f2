"""One offline HTML page about many jobs on one cluster: completion times, a Gantt chart, loads of links.

Policies take the place that strategies have on other pages. The data of its figures:

strategies  [{"text", "name", "colour", "symbol"}]
cdfs        [{"strategy", "seconds": [time]}]                     completion times, short ones first
charts      [{"strategy", "jobs": [[name, arrival, end, GPUs]], "stays": [[job, begin, end, GPUs]]}]
                                                                  the first jobs, by position; times in seconds
links       [{"strategy", "names": [text], "times": [second], "load": [[share]]}]
                                                                  the busiest, one list of shares for each link
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np

from laconic.cluster import Cluster
from laconic.jobs import Costs, Outcome
from laconic.report.ink import Ink, looks
from laconic.report.standalone_html import render_page
from laconic.units import human_duration

_MOST_JOBS = 200
"""In the Gantt chart of one policy."""
_MOST_LINKS = 24
_BUSY = 0.1
"""Links whose load never reaches this share are left out."""
_TIMES = 60
"""Columns in the figure of links."""


def render(outcomes: Sequence[Outcome], *, cluster: Cluster, costs: Costs, trace: str, notes: Sequence[str]) -> str:
    """The page as text; trace: what the jobs were read from."""
    inks = looks({outcome.policy: outcome.policy for outcome in outcomes}, "")
    soonest = min(outcomes, key=lambda outcome: outcome.average_completion_s)
    values = {
        "title": f"{len(soonest.jobs)} jobs on {soonest.num_gpus} GPUs",
        "cluster": cluster.describe(),
        "trace": trace,
        "inks": list(inks.values()),
        "lines": [(outcome, inks[outcome.policy], _numbers(outcome)) for outcome in outcomes],
        "soonest": soonest,
        "most_jobs": min(_MOST_JOBS, len(soonest.jobs)),
        "has_links": any(outcome.link_load.size and outcome.link_load.max() >= _BUSY for outcome in outcomes),
        "served": soonest.served,
        "costs": asdict(costs),
        "notes": notes,
    }
    return render_page("schedule_page", _document(outcomes, inks), {"duration": human_duration}, values)


def _numbers(outcome: Outcome) -> dict[str, object]:
    chosen = outcome.strategy_seconds()
    total_s = sum(chosen.values())
    return {
        "p95_s": float(np.percentile(outcome.completion_s, 95)),
        "worst": float(outcome.fairness.max()),
        "load": float(outcome.mean_link_load.max()) if outcome.link_load.size else None,
        "strategies": [(text, seconds / total_s) for text, seconds in chosen.items()] if total_s else [],
    }


def _document(outcomes: Sequence[Outcome], inks: Mapping[str, Ink]) -> dict[str, object]:
    place = {text: number for number, text in enumerate(inks)}
    return {
        "strategies": [asdict(ink) for ink in inks.values()],
        "cdfs": [
            {"strategy": place[outcome.policy], "seconds": _rounded(np.sort(outcome.completion_s))}
            for outcome in outcomes
        ],
        "charts": [{"strategy": place[outcome.policy], **_chart(outcome)} for outcome in outcomes],
        "links": [{"strategy": place[outcome.policy], **_links(outcome)} for outcome in outcomes],
    }


def _chart(outcome: Outcome) -> dict[str, object]:
    # Jobs are numbered in order of arrival.
    count = min(_MOST_JOBS, len(outcome.jobs))
    return {
        "jobs": [
            [job.name, round(float(outcome.arrival_s[number])), round(float(outcome.finish_s[number])), job.gpus]
            for number, job in enumerate(outcome.jobs[:count])
        ],
        "stays": [
            [stay.job, round(stay.begin_s), round(stay.end_s), stay.gpus] for stay in outcome.stays if stay.job < count
        ],
    }


def _links(outcome: Outcome) -> dict[str, object]:
    if not outcome.link_load.size:
        return {"names": [], "times": [], "load": []}
    busiest = np.argsort(-outcome.mean_link_load, kind="stable")[:_MOST_LINKS]
    busiest = busiest[outcome.link_load[:, busiest].max(axis=0) >= _BUSY]
    parts = np.array_split(np.arange(len(outcome.load_times_s)), min(_TIMES, len(outcome.load_times_s)))
    return {
        "names": [outcome.link_names[link] for link in busiest],
        "times": _rounded(np.array([outcome.load_times_s[part[0]] for part in parts])),
        "load": [[round(float(outcome.link_load[part, link].mean()), 3) for part in parts] for link in busiest],
    }


def _rounded(seconds: np.ndarray) -> list[float]:
    return [round(float(value), 1) for value in seconds]
