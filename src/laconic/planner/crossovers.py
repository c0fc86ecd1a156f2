"""The best strategy at each bandwidth, and the crossovers between them.

A few strategies - the best of each kind here, and those that pay on much slower or faster links - are simulated at two
bandwidths per decade. Where the best one changes between two of these, the crossover is interpolated between the
logarithms of both times. Task graphs are built once and run at every bandwidth.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from laconic.planner.answer import CLOSE, Answer, Progress
from laconic.planner.choice import Choice, Judge
from laconic.planner.islands import as_islands, between_islands
from laconic.planner.question import Question, rated_bps
from laconic.simulator import Simulation
from laconic.strategy import Strategy

_SLOWEST_BPS, _FASTEST_BPS = 1e7, 3.2e12
_PER_DECADE = 2
_INSIDE_BPS = (1e10, 1e13)
"""The slowest and fastest bandwidth inside one host."""
_OFTEN_BEST = (
    "bsp / all_reduce / bf16 / fusion",
    "bsp / all_reduce / int8 / fusion",
    "onebit-adam",
    "demo-int4",
    "diloco(period=32)",
    "streaming_diloco / all_reduce / int4 + error_feedback",
    "streaming_diloco(period=100) / all_reduce / int4 + error_feedback",
)
"""Considered wherever they may be ranked: each is the best somewhere."""
_MOST_STRATEGIES = 12


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The best strategy for one bandwidth and one number of workers."""

    bandwidth_bps: float
    workers: int
    choice: Choice
    sooner: float
    """The speed-up over the baseline in time to the baseline's loss."""


@dataclass(frozen=True, kw_only=True)
class BandwidthRange:
    """A range of bandwidths with one best strategy."""

    from_bps: float
    """0: no lower bound."""
    to_bps: float
    """Infinite: no upper bound."""
    choice: Choice
    """The best choice at some bandwidth in the range."""


def finalists(answer: Answer) -> list[Strategy]:
    """The strategies that are simulated at other bandwidths, the baseline first; those between islands are added."""
    ranked_here = [choice for choice in answer.ranked if not choice.islands]
    wanted = [answer.baseline.strategy, *(choice.strategy for choice in answer.top if not choice.islands)]
    lossless = [choice.strategy for choice in ranked_here if choice.loses_nothing]
    # On slow links schedules differ little; on fast ones, schedules that defer updates are ahead.
    deferred = [strategy for strategy in lossless if strategy.scheduling.defers]
    ranked = {str(choice.strategy) for choice in ranked_here}
    often = [strategy for text in _OFTEN_BEST if str(strategy := Strategy.parse(text)) in ranked]
    return list(dict.fromkeys([*wanted, *lossless[:1], *deferred[:1], *often]))[:_MOST_STRATEGIES]


def bandwidths(question: Question) -> list[float]:
    """The bandwidths that are simulated, the question's own among them."""
    own_bps = rated_bps(question.setting, inside=question.is_one_host)
    slowest, fastest = _INSIDE_BPS if question.is_one_host else (_SLOWEST_BPS, _FASTEST_BPS)
    count = round(_PER_DECADE * math.log10(fastest / slowest)) + 1
    grid = [slowest * (fastest / slowest) ** (number / (count - 1)) for number in range(count)]
    return sorted({*grid, own_bps})


def ranges(answer: Answer, progress: Progress) -> list[BandwidthRange]:
    """The best strategy from the slowest links to the fastest."""
    strategies, rates, drawn = finalists(answer), bandwidths(answer.question), dict[str, Simulation]()
    rows = [
        _choices(answer.question.at_bandwidth(rate), strategies, drawn, progress, (number, len(rates)))
        for number, rate in enumerate(rates)
    ]
    best = [_best(row, answer) for row in rows]
    found: list[BandwidthRange] = []
    begins_bps = 0.0
    for (low_bps, here), (high_bps, there) in pairwise(zip(rates, range(len(rates)), strict=True)):
        if best[here] != best[there]:
            ends_bps = _crossing((rows[here], rows[there]), (best[here], best[there]), (low_bps, high_bps))
            found.append(BandwidthRange(from_bps=begins_bps, to_bps=ends_bps, choice=rows[here][best[here]]))
            begins_bps = ends_bps
    return [*found, BandwidthRange(from_bps=begins_bps, to_bps=math.inf, choice=rows[-1][best[-1]])]


def cells(answer: Answer, hosts: Sequence[int], progress: Progress) -> list[Cell]:
    """The best strategy for every bandwidth and number of hosts."""
    strategies, found = finalists(answer), list[Cell]()
    rates = bandwidths(answer.question)[::2]
    places = [(rate, count) for count in hosts for rate in rates]
    drawn: dict[int, dict[str, Simulation]] = defaultdict(dict)
    for number, (rate, count) in enumerate(places):
        question = answer.question.with_hosts(count).at_bandwidth(rate)
        row = _choices(question, strategies, drawn[count], progress, (number, len(places)))
        best = row[_best(row, answer)]
        found.append(
            Cell(
                bandwidth_bps=rate,
                workers=question.setting.workers,
                choice=best,
                sooner=row[str(answer.baseline.strategy)].seconds / best.seconds,
            )
        )
    return found


def _choices(
    question: Question,
    strategies: Sequence[Strategy],
    drawn: dict[str, Simulation],
    progress: Progress,
    place: tuple[int, int],
) -> dict[str, Choice]:
    """The prediction for each; `drawn` caches task graphs across bandwidths."""
    judge, (number, total) = Judge(question, drawn), place
    found: dict[str, Choice] = {}
    for done, strategy in enumerate(strategies):
        progress(number * len(strategies) + done, total * len(strategies), "bandwidths")
        if not isinstance(choice := judge.choice(strategy), str) and choice.standing == "ranked":
            found[str(strategy)] = choice
    between = [] if (hosts := as_islands(question, drawn)) is None else between_islands(hosts, drawn)
    return found | {f"islands: {one.strategy}": one for one in between if one.standing == "ranked"}


def _best(row: dict[str, Choice], answer: Answer) -> str:
    """As for one answer: the simplest of those within CLOSE."""
    least_s = min(choice.seconds for choice in row.values())
    baseline = str(answer.baseline.strategy)

    def simplicity(text: str) -> tuple[int, float]:
        choice = row[text]
        return (0 if text == baseline else 1 if choice.loses_nothing and not choice.islands else 2), choice.seconds

    return min((text for text, choice in row.items() if choice.seconds <= (1 + CLOSE) * least_s), key=simplicity)


def _crossing(
    rows: tuple[dict[str, Choice], dict[str, Choice]], best: tuple[str, str], rates_bps: tuple[float, float]
) -> float:
    """The bandwidth at which the best strategies of both ends take the same time."""
    (first, second), (low_bps, high_bps) = best, rates_bps
    if any(text not in row for text in best for row in rows):
        return math.sqrt(low_bps * high_bps)
    before, after = (math.log(row[second].seconds / row[first].seconds) for row in rows)
    # Within CLOSE the simpler one is taken, so both ends may lie on one side.
    along = before / (before - after) if before > 0 > after else 0.5
    return low_bps * (high_bps / low_bps) ** along
