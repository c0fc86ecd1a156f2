"""How far predicted serving is from a published table, by framework and for ratios between tensor-parallel degrees.

    python -m benchmarks.serving_errors aiconfigurator_silicon_inference.csv [--spread]

Ratios are of the time per output token, between rows that differ in nothing but the degree; several rows of one
configuration count once, with their median. The constants were fitted to every tenth aggregated row, which is left out
of the errors. With --spread the command prints instead how far the measurements differ from each other, and the errors
of a regressor that learns from the table: a bound for any prediction (serving_spread.py; takes a minute).
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations

from benchmarks.serving_spread import TPOT, TTFT, report
from laconic.simulator.reference.rows import Compared, compare, read_rows
from laconic.simulator.reference.tables import published_table

_FITTED_EVERY = 10
CONFIGURATION = (
    *("backend", "backend_version", "model_path", "system", "precision", "isl", "osl", "concurrency"),
    "attention_dp_size",
)


def median_error(rows: Iterable[Compared], column: str) -> str:
    """In percent, with the number of rows."""
    errors = [abs(row.errors[column]) for row in rows if column in row.errors]
    return f"{statistics.median(errors):6.1%} ({len(errors)})" if errors else "-"


def ratio_errors(rows: Sequence[Compared]) -> list[float]:
    """Of predicted ratios between two degrees, relative to measured ones."""
    groups: dict[tuple[str, ...], dict[int, list[Compared]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        expert_parallel = "ep" if row.row.whole("moe_ep_size", empty=1, least=0) > 1 else ""
        key = (*(row.row[column] for column in CONFIGURATION), expert_parallel)
        groups[key][row.row.whole("tp_size")].append(row)
    errors = []
    for by_degree in groups.values():
        for few, many in combinations(sorted(by_degree), 2):
            predicted = by_degree[many][0].predicted[TPOT] / by_degree[few][0].predicted[TPOT]
            measured = [statistics.median(row.row.number(TPOT) for row in by_degree[degree]) for degree in (few, many)]
            errors.append(predicted / (measured[1] / measured[0]) - 1)
    return errors


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file")
    parser.add_argument("--spread", action="store_true", help="differences between measurements, instead of errors")
    arguments = parser.parse_args()
    table = published_table("serving")
    found = compare(table, read_rows(arguments.file, table))
    together = [row for row in found if row.row["mode"] == "agg"]
    apart = [row for row in found if row.row["mode"] == "disagg"]
    if arguments.spread:
        tenth = {id(row) for row in together[::_FITTED_EVERY]}
        for line in report(found, lambda row: id(row) in tenth):
            print(line, flush=True)
        return
    counted = [row for index, row in enumerate(together) if index % _FITTED_EVERY]
    for framework in ("vllm", "sglang", "trtllm"):
        for column in (TPOT, TTFT):
            here = [row for row in counted if row.row["backend"] == framework]
            print(f"aggregated             {framework:7s} {column:16s} median {median_error(here, column)}")
    for column in (TPOT, TTFT):
        print(f"aggregated             all     {column:16s} median {median_error(counted, column)}")
        print(f"disaggregated          all     {column:16s} median {median_error(apart, column)}")
        named = [row for row in apart if row.row["decode_num_workers"]]
        print(f"... workers named      all     {column:16s} median {median_error(named, column)}")
    errors = ratio_errors(together)
    size = statistics.median(map(abs, errors))
    print(
        f"ratios between degrees, aggregated: median {size:.1%}, bias {statistics.median(errors):+.1%} ({len(errors)})"
    )


if __name__ == "__main__":
    main()
