"""How far published times to the first token can be predicted at all from the columns of their table.

Four measurements, each on distinct measurements (the table has some of them several times, under other degrees of
parallelism or rounded):

- repeats: rows that differ in nothing but version and date;
- series: a row compared with the interpolation of its two neighbours in concurrency, of the same run;
- groups: errors of the predictions that are left when the median error of each framework, model, system and precision
  is taken away, which nobody knows in advance;
- learned: the errors of a regressor (random_trees.py) that has seen other rows of the table.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import combinations

import numpy as np

from benchmarks.random_trees import Values, forest
from laconic.simulator.reference.rows import Compared

TTFT, TPOT = "silicon_ttft_ms", "silicon_tpot_ms"
_WORDS = ("backend", "backend_version", "model_path", "system", "precision")
_COUNTS = (
    *("isl", "osl", "concurrency", "batch_size", "tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size"),
    *("prefill_num_workers", "prefill_tp_size", "prefill_moe_ep_size"),
    *("decode_batch_size", "decode_num_workers", "decode_tp_size", "decode_moe_ep_size"),
)
_SAME = 0.002
"""Two rows of one load are the same measurement where both times differ by less than this."""
_FOLDS = 10


def distinct(rows: Sequence[Compared]) -> list[Compared]:
    """Every measurement once."""
    kept: dict[Hashable, list[Compared]] = defaultdict(list)
    for row in rows:
        load = kept[tuple(row.row[column] for column in ("backend", "system", "isl", "osl", "concurrency"))]
        if not any(_difference(row, other, TTFT) < _SAME and _difference(row, other, TPOT) < _SAME for other in load):
            load.append(row)
    return [row for rows_of_load in kept.values() for row in rows_of_load]


def repeats(rows: Sequence[Compared], column: str, *, same_version: bool) -> list[float]:
    """Relative differences of pairs of rows with the same configuration."""
    groups: dict[Hashable, list[Compared]] = defaultdict(list)
    for row in rows:
        groups[_configuration(row, version=False)].append(row)
    return [
        _difference(one, other, column)
        for group in groups.values()
        for one, other in combinations(group, 2)
        if (one.row["backend_version"] == other.row["backend_version"]) == same_version
    ]


def series(rows: Sequence[Compared], column: str) -> list[float]:
    """Deviations from the interpolation between a quarter to four times the concurrency, on a logarithmic scale."""
    groups: dict[Hashable, dict[int, Compared]] = defaultdict(dict)
    for row in rows:
        clients = row.row.whole("concurrency", empty=1)
        groups[_configuration(row, version=True, clients=False)][clients] = row
    found = []
    for by_clients in groups.values():
        ordered = sorted(by_clients)
        for few, here, many in zip(ordered, ordered[1:], ordered[2:], strict=False):
            if many / few <= 4:
                weight = math.log(here / few) / math.log(many / few)
                low, middle, high = (math.log(by_clients[n].row.number(column)) for n in (few, here, many))
                found.append(abs(math.expm1(low * (1 - weight) + high * weight - middle)))
    return found


def left_in_groups(rows: Sequence[Compared], column: str) -> list[float]:
    """Errors without the median error of the row's framework, model, system and precision."""
    groups: dict[Hashable, list[float]] = defaultdict(list)
    for row in rows:
        key = tuple(row.row[name] for name in ("backend", "model_path", "system", "precision"))
        groups[key].append(math.log1p(row.errors[column]))
    return [abs(math.expm1(error - statistics.median(errors))) for errors in groups.values() for error in errors]


def learned(
    rows: Sequence[Compared],
    column: str,
    parts: Sequence[Hashable],
    asked_parts: Iterable[Hashable],
    *,
    predicted: bool,
) -> list[float]:
    """Errors of the regressor for the rows of each of `asked_parts`, learned from the rows of all other parts.

    parts: for every row, the part it belongs to; predicted: the regressor learns the errors of the predictions, and
    knows these too.
    """
    features = _features(rows, predicted=predicted)
    measured = np.log([row.row.number(column) for row in rows])
    known = np.log([row.predicted[column] for row in rows]) if predicted else np.zeros(len(rows))
    errors: list[float] = []
    for part in asked_parts:
        asked = np.array([one == part for one in parts])
        found = forest(features[~asked], (measured - known)[~asked], features[asked]) + known[asked]
        errors += np.abs(np.expm1(found - measured[asked])).tolist()
    return errors


def report(rows: Sequence[Compared], calibrated: Callable[[Compared], bool]) -> Iterator[str]:
    """The lines of the report; `calibrated` says which rows the constants of the predictions were fitted to."""
    for mode in ("agg", "disagg"):
        here = distinct([row for row in rows if row.row["mode"] == mode])
        for words, same in (("same version", True), ("other version", False)):
            for column in (TTFT, TPOT):
                yield _line(mode, f"repeats, {words}", column, repeats(here, column, same_version=same))
        for column in (TTFT, TPOT):
            yield _line(mode, "series", column, series(here, column))
            yield _line(mode, "groups", column, left_in_groups(here, column))
    here = distinct([row for row in rows if row.row["mode"] == "agg"])
    folds = np.random.default_rng(0).integers(_FOLDS, size=len(here)).tolist()
    combined = [tuple(row.row[name] for name in ("backend", "model_path", "system")) for row in here]
    held_out = {group: index % _FOLDS for index, group in enumerate(sorted(set(combined)))}
    others = [held_out[group] for group in combined]
    tenth = [calibrated(row) for row in here]
    for predicted in (False, True):
        words = "learned, columns and prediction" if predicted else "learned, columns"
        for known, parts, asked in (
            ("from 90% of rows", folds, range(_FOLDS)),
            ("other models", others, range(_FOLDS)),
            ("from the tenth", tenth, (False,)),
        ):
            errors = learned(here, TTFT, parts, asked, predicted=predicted)
            yield _line("agg", f"{words}, {known}", TTFT, errors)


def _line(mode: str, words: str, column: str, errors: Sequence[float]) -> str:
    median = f"{statistics.median(errors):6.1%}" if errors else "     -"
    return f"{mode:6s} {words:50s} {column:16s} median {median} ({len(errors)})"


def _difference(one: Compared, other: Compared, column: str) -> float:
    small, large = sorted((one.row.number(column), other.row.number(column)))
    return large / small - 1


def _configuration(row: Compared, *, version: bool, clients: bool = True) -> Hashable:
    left_out = {*(() if version else ("backend_version",)), *(() if clients else ("concurrency", "batch_size"))}
    left_out |= set() if clients else {"decode_batch_size"}
    return tuple(row.row[column] for column in (*_WORDS, *_COUNTS) if column not in left_out)


def _features(rows: Sequence[Compared], *, predicted: bool) -> Values:
    """One column per word that occurs, and logarithms of the counts and predictions."""
    columns = [
        [float(row.row[column] == word) for row in rows]
        for column in _WORDS
        for word in sorted({row.row[column] for row in rows})
    ]
    for column in _COUNTS:
        columns.append([math.log(max(1, row.row.whole(column, empty=1, least=0))) for row in rows])
    if predicted:
        columns += [[math.log(row.predicted[column]) for row in rows] for column in (TTFT, TPOT)]
    return np.array(columns).T
