"""How far predicted serving is from a published table after calibration with a part of its rows.

    python -m benchmarks.serving_calibration aiconfigurator_silicon_inference.csv [--seeds 5]

Predictions are corrected by the errors of randomly drawn rows (reference/residuals.py); errors are those of the rows
that were neither drawn nor used to fit laconic's constants. Measurements that the table has several times count once.
The command also prints errors for other constants of the correction, each row of the tenth that laconic's constants
were fitted to being corrected by the other rows of this tenth.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import numpy as np

from benchmarks.serving_spread import TPOT, TTFT, distinct
from laconic.simulator.reference.published import PublishedTable
from laconic.simulator.reference.residuals import Smoothing, calibrated
from laconic.simulator.reference.rows import Compared, compare, read_rows
from laconic.simulator.reference.tables import published_table

_FITTED_EVERY = 10
_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)
_SMOOTHINGS = (
    Smoothing(),
    Smoothing(word=0.35),
    Smoothing(word=1.4),
    Smoothing(count=0.125),
    Smoothing(count=0.5),
    Smoothing(noise=0.02),
    Smoothing(noise=0.2),
)


def curve(table: PublishedTable, rows: Sequence[Compared], fitted: set[int], seeds: int) -> dict[str, list[float]]:
    """Median errors by column for each of _SHARES, the mean over random draws; `fitted` are ids of rows."""
    found: dict[str, list[float]] = {TTFT: [], TPOT: []}
    for share in _SHARES:
        medians: dict[str, list[float]] = {TTFT: [], TPOT: []}
        for seed in range(seeds):
            order = np.random.default_rng(seed).permutation(len(rows)).tolist()
            number = round(share * len(rows))
            known = [rows[index] for index in order[:number]]
            asked = [rows[index] for index in order[number:] if id(rows[index]) not in fitted]
            after = [row.compared for row in calibrated(table, asked, known)] if known else asked
            for column, errors in medians.items():
                errors.append(statistics.median(abs(row.errors[column]) for row in after))
        for column, errors in medians.items():
            found[column].append(statistics.fmean(errors))
    return found


def left_out(table: PublishedTable, rows: Sequence[Compared], smoothing: Smoothing, column: str) -> float:
    """The median error of rows that are each corrected by all others."""
    return statistics.median(
        abs(calibrated(table, [row], [*rows[:index], *rows[index + 1 :]], smoothing)[0].compared.errors[column])
        for index, row in enumerate(rows)
    )


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file")
    parser.add_argument("--seeds", type=int, default=5, help="random draws for each share")
    arguments = parser.parse_args()
    table = published_table("serving")
    found = compare(table, read_rows(arguments.file, table))
    tenth = [row for row in found if row.row["mode"] == "agg"][::_FITTED_EVERY]
    fitted = {id(row) for row in tenth}
    print("shares          " + "".join(f"{share:8.0%}" for share in _SHARES))
    for mode in ("agg", "disagg"):
        rows = distinct([row for row in found if row.row["mode"] == mode])
        for column, errors in curve(table, rows, fitted, arguments.seeds).items():
            print(f"{mode:6s} {column:16s}" + "".join(f"{error:8.1%}" for error in errors) + f"  ({len(rows)} rows)")
    for smoothing in _SMOOTHINGS:
        errors = [left_out(table, distinct(tenth), smoothing, column) for column in (TTFT, TPOT)]
        print(f"left out of the tenth, {smoothing}: {errors[0]:.1%} {errors[1]:.1%}", flush=True)


if __name__ == "__main__":
    main()
