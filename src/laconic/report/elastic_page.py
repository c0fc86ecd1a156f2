"""One offline HTML page about an elastic run: members over time, seconds lost per change, goodput.

Processes take the place that strategies have on other pages. The data of its figures, with times in seconds:

strategies  [{"text", "name", "colour", "symbol"}]                one for each process
stays       [{"strategy", "begin", "end"}]                        while it was a member
counts      [[time, ranks]]                                       the number of members from then on
progress    [[time, units]]                                       units completed by then, thinned
seconds     the whole
changes     [{"view", "time", "lost", "words"}]
faults      [{"time", "words"}]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from laconic.report.elastic_run import ElasticRun, MembershipChange
from laconic.report.ink import looks
from laconic.report.sentences import milliseconds
from laconic.report.standalone_html import render_page
from laconic.units import human_duration

_MOST_POINTS = 1000


def render(run: ElasticRun, *, title: str) -> str:
    """The page as text."""
    workers = list(dict.fromkeys(stay.worker for stay in run.stays))
    inks = looks({worker: worker for worker in workers}, "")
    values = {
        "title": title,
        "run": run,
        "inks": list(inks.values()),
        "num_deaths": sum(len(change.died) for change in run.changes),
        "num_joins": sum(len(change.joined) for change in run.changes),
        "num_redone": sum(change.redone for change in run.changes),
        "lines": [(change, happened(change)) for change in run.changes],
        "quiet": [fault for fault in run.faults if fault.view is None],
    }
    filters = {"duration": human_duration, "ms": milliseconds}
    return render_page("elastic_page", _document(run, workers, [asdict(ink) for ink in inks.values()]), filters, values)


def happened(change: MembershipChange) -> str:
    """What became of the ranks, in words."""
    parts = [
        f"{', '.join(names)} {verb}"
        for names, verb in ((change.died, "died"), (change.joined, "joined"), (change.leaving, "left"))
        if names
    ]
    return "; ".join(parts) or "the same ranks connected again"


def _document(run: ElasticRun, workers: Sequence[str], inks: Sequence[Mapping[str, object]]) -> dict[str, object]:
    every = max(1, -(-len(run.progress) // _MOST_POINTS))
    first = len({stay.worker for stay in run.stays if stay.begin_s <= 0})
    return {
        "strategies": inks,
        "stays": [
            {"strategy": workers.index(stay.worker), "begin": _ms(stay.begin_s), "end": _ms(stay.end_s)}
            for stay in run.stays
        ],
        "counts": [[0.0, first], *([_ms(change.time_s), change.num_ranks] for change in run.changes)],
        "progress": [[_ms(time_s), number + 1] for number, time_s in enumerate(run.progress) if number % every == 0],
        "seconds": _ms(run.seconds),
        "changes": [
            {
                "view": change.view,
                "time": _ms(change.time_s),
                "lost": _ms(change.lost_s),
                "words": f"{happened(change)}{f' ({change.fault})' if change.fault else ''}",
            }
            for change in run.changes
        ],
        "faults": [{"time": _ms(fault.time_s), "words": fault.text} for fault in run.faults],
    }


def _ms(seconds: float) -> float:
    """To the millisecond: more cannot be seen."""
    return round(seconds, 3)
