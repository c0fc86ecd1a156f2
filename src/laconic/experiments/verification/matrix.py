"""Pairwise testing of registered methods: strategies in which each pair that can be combined occurs at least once.

There are hundreds of thousands of strategies with default settings. Errors in combinations of methods nearly always
come from two of them, so a few hundred strategies that hold all pairs are verified instead. Where no strategy can hold
two methods, the rule of legality that refuses them is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Literal, NamedTuple, cast

from laconic.architecture import ARCHITECTURES
from laconic.compression import COMPRESSORS, Compressor, Wrapper
from laconic.errors import StrategyError
from laconic.experiments.verification.outcome import Findings
from laconic.scheduling import SCHEDULES
from laconic.strategy import AXES, Strategy
from laconic.strategy.legality import ALONE, RULES, Parts, first_refusal
from laconic.synchronization import SYNCHRONIZATIONS

_TOGETHER = [rule for rule in RULES if rule not in ALONE]
_TRIED = 48
"""Candidates compared before a strategy is chosen for a pair: with more, fewer strategies are needed, in more time."""


class Name(NamedTuple):
    """A method by its place in a strategy."""

    place: str
    """An axis, or "wrapper"."""
    name: str
    """As registered; "" for no wrapper."""


PLACES = ("synchronization", "architecture", "compression", "wrapper", "scheduling")
Pair = tuple[Name, Name]
"""In the order of PLACES."""
Row = tuple[Name, ...]
"""One name for each place: a strategy with default settings."""
PairVerdict = Literal["passed", "refused", "failed", "not reached"]
"""refused: no strategy can hold both. not reached: stopped before a strategy that holds both was verified."""


@dataclass(frozen=True)
class Refused:
    """Why no strategy can hold two methods."""

    rule: str
    """The summary of the rule."""
    reason: str
    """Why the rule refuses these two."""


@dataclass(frozen=True)
class Matrix:
    """All pairs of registered names: those that some strategy holds, and those that a rule refuses."""

    rows: Mapping[Strategy, Row]
    """The strategies to verify, and the names in each."""
    refused: Mapping[Pair, Refused]

    def pairs(self) -> list[Pair]:
        """Every pair, sorted by the places of both."""
        held = {pair for row in self.rows.values() for pair in pairs_of(row)}
        order = {place: number for number, place in enumerate(PLACES)}
        return sorted({*held, *self.refused}, key=lambda pair: [(order[name.place], name.name) for name in pair])

    def verdicts(self, findings: Sequence[Findings]) -> dict[Pair, PairVerdict]:
        """The verdict on each pair: it passed if some strategy that holds it passed every check."""
        failed = {one.strategy for one in findings if one.failures}
        found: dict[Pair, PairVerdict] = dict.fromkeys(self.pairs(), "not reached")
        for pair in self.refused:
            found[pair] = "refused"
        seen = {one.strategy for one in findings}
        made = {text: row for strategy, row in self.rows.items() if (text := str(strategy)) in seen}
        # Those that failed first: of a pair that is in several strategies one may have passed.
        for text in sorted(made, key=lambda text: text not in failed):
            for pair in pairs_of(made[text]):
                found[pair] = "failed" if text in failed else "passed"
        return found


def registered() -> dict[str, list[str]]:
    """The registered names for every place."""
    found: dict[str, list[str]] = {place: [] for place in PLACES}
    for axis, registry in AXES.items():
        for method in registry:
            found["wrapper" if issubclass(method, Wrapper) else axis].append(method.name)
    return found


def pairs_of(row: Row) -> Iterator[Pair]:
    """The pairs of methods in a row."""
    return combinations([name for name in row if name.name], 2)


def matrix(names: Mapping[str, Sequence[str]] | None = None) -> Matrix:
    """The matrix of these names, of all that are registered if none are given."""
    known = {place: [Name(place, name) for name in given] for place, given in (names or registered()).items()}
    usual = _row_of(Strategy())
    bare = [row for row in _without_schedules(known) if _fits((*row, usual["scheduling"]))]
    holding: dict[Name, list[Row]] = {}
    for row in bare:
        for name in row:
            holding.setdefault(name, []).append(row)
    open_pairs: dict[Pair, None] = {}
    refused: dict[Pair, Refused] = {}
    for one, other in combinations(PLACES, 2):
        for pair in ((a, b) for a in known[one] for b in known[other]):
            if next(_rows_with(pair, holding, known), None) is None:
                refused[pair] = _why(pair, known)
            else:
                open_pairs[pair] = None
    chosen: dict[Strategy, Row] = {}
    # Those of the longest lists first: each needs a strategy of its own, which the others then share.
    sizes = {place: len(given) for place, given in known.items()}
    for pair in sorted(open_pairs, key=lambda pair: -sizes[pair[0].place] * sizes[pair[1].place]):
        if pair in open_pairs:
            row = _best(_rows_with(pair, holding, known), open_pairs)
            chosen[_strategy(row)] = row
            for held in pairs_of(row):
                open_pairs.pop(held, None)
    return Matrix(chosen, refused)


def _without_schedules(known: Mapping[str, Sequence[Name]]) -> Iterator[Row]:
    """Every stack of compressors that is allowed at all, with every synchronization and architecture."""
    wrappers = [Name("wrapper", ""), *known["wrapper"]]
    stacks = [(what, around) for what in known["compression"] for around in wrappers if _may_wrap(what, around)]
    for when in known["synchronization"]:
        for whom in known["architecture"]:
            for stack in stacks:
                yield (when, whom, *stack)


def _rows_with(pair: Pair, holding: Mapping[Name, list[Row]], known: Mapping[str, Sequence[Name]]) -> Iterator[Row]:
    """The rows that hold both; a sample spread evenly over all of them comes first."""
    fixed = [name for name in pair if name.place != "scheduling"]
    schedules = [name for name in pair if name.place == "scheduling"] or known["scheduling"]
    rows = [row for row in holding.get(fixed[0], []) if all(name in row for name in fixed)]
    stride = max(1, len(rows) // _TRIED)
    for first in range(stride):
        for bare in rows[first::stride]:
            for schedule in schedules:
                if _fits(row := (*bare, schedule)):
                    yield row


def _best(rows: Iterable[Row], open_pairs: Mapping[Pair, None]) -> Row:
    """Of the first few rows, the one with the most pairs that no other row holds yet."""
    best, most = None, -1
    for tried, row in enumerate(rows):
        if tried == _TRIED:
            break
        new = sum(pair in open_pairs for pair in pairs_of(row))
        if new > most:
            best, most = row, new
    assert best is not None, "a pair that no row holds is refused"
    return best


def _built(row: Row) -> Parts:
    when, whom, what, around, order = (name.name for name in row)
    return Parts(
        SYNCHRONIZATIONS.lookup(when)(), ARCHITECTURES.lookup(whom)(), _stack(what, around), SCHEDULES.lookup(order)()
    )


@lru_cache(maxsize=1024)
def _stack(name: str, wrapper: str) -> Compressor:
    plain = COMPRESSORS.lookup(name)()
    return cast("type[Wrapper]", COMPRESSORS.lookup(wrapper))(plain) if wrapper else plain


def _may_wrap(what: Name, around: Name) -> bool:
    usual = _row_of(Strategy())
    try:
        parts = _built(_as_row({**usual, "compression": what, "wrapper": around}))
    except StrategyError:  # some wrappers are not even built around some compressors
        return False
    return first_refusal(parts, ALONE) is None


@lru_cache(maxsize=2**17)
def _fits(row: Row) -> bool:
    """Whether all axes fit together; the rules of compression alone have been checked before."""
    return first_refusal(_built(row), _TOGETHER) is None


def _strategy(row: Row) -> Strategy:
    parts = _built(row)
    return Strategy(parts.synchronization, parts.architecture, parts.compression, parts.scheduling)


def _why(pair: Pair, known: Mapping[str, Sequence[Name]]) -> Refused:
    """The rule that refuses the pair: the first whose nearest allowed strategy gives up one of the two."""
    fixed = {**_row_of(Strategy()), **{name.place: name for name in pair}}
    if fixed["wrapper"].name and not any(name.place == "compression" for name in pair):
        # One that it may wrap: that it cannot wrap another says nothing about these two.
        fitting = (base for base in known["compression"] if _may_wrap(base, fixed["wrapper"]))
        fixed["compression"] = next(fitting, fixed["compression"])
    row = _as_row(fixed)
    try:
        parts = _built(row)
    except StrategyError as exc:
        return Refused("A wrapper fits the compressor it is built around.", str(exc))
    reason = None
    while (refused := first_refusal(parts)) is not None:
        rule, refusal = refused
        summary = (rule.__doc__ or rule.__name__).strip().splitlines()[0]
        reason = Refused(summary, refusal.reason)
        names = _row_of(refusal.nearest).values()
        if not all(name in names for name in pair):
            break
        parts = refusal.nearest
    if reason is None:
        return Refused("Some methods need a setting other than its default to meet.", f'nearest is "{parts.text()}"')
    return reason


def _as_row(by_place: Mapping[str, Name]) -> Row:
    return tuple(by_place[place] for place in PLACES)


def _row_of(parts: Parts | Strategy) -> dict[str, Name]:
    """The names in a strategy by their place; of several wrappers the outermost."""
    layers = [layer.name for layer in parts.compression.layers()]
    names = {
        "synchronization": parts.synchronization.name,
        "architecture": parts.architecture.name,
        "compression": layers[-1],
        "wrapper": layers[0] if len(layers) > 1 else "",
        "scheduling": parts.scheduling.name,
    }
    return {place: Name(place, name) for place, name in names.items()}
