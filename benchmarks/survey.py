"""The simulator beside the quantitative survey: every figure of a file with its prediction and the error.

    python -m benchmarks.survey FILE.csv [--without-assumptions]

The file has the columns model, network, method, n_gpus, throughput_mean and suspect ("yes" for figures to leave out).
Predictions are those of `laconic simulate --reference quantitative-survey`. Printed are all rows, the mean absolute
error with and without the rows it is calibrated on (BSP), and for each model and network whether the method predicted
to be the best is within 3% of the best one measured, of those in the file.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import defaultdict
from dataclasses import dataclass

from laconic.simulator.reference import quantitative_survey

NETWORKS = {
    "10GbE with TCP/IP": "10GbE",
    "100GbE with TCP/IP": "100GbE",
    "100GbIB with RDMA": "100GbIB",
}
CLOSE = 0.03


@dataclass(frozen=True)
class Row:
    """One figure."""

    model: str
    network: str
    method: str
    gpus: int
    measured: float
    predicted: float
    suspect: bool

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted / self.measured - 1

    @property
    def calibrated(self) -> bool:
        """Whether the prediction was made from this very figure."""
        return self.method.startswith("BSP")

    def line(self) -> str:
        """A line of the table."""
        mark = "  suspect, not counted" if self.suspect else "  calibrated on" if self.calibrated else ""
        return (
            f"{self.model:10} {self.network:8} {self.method:18} {self.gpus:3} {self.measured:9.1f} "
            f"{self.predicted:9.1f} {self.error:+7.1%}{mark}"
        )


def read(path: str, assumptions: quantitative_survey.Assumptions) -> list[Row]:
    predicted = {
        (cell["model"], cell["network"], cell["method"], cell["gpus"]): cell["throughput"]
        for cell in quantitative_survey.table(assumptions)
    }
    rows: list[Row] = []
    with open(path, encoding="utf-8", newline="") as file:  # noqa: PTH123
        for line in csv.DictReader(file):
            network = NETWORKS.get(line["network"], line["network"])
            key = line["model"], network, line["method"], int(line["n_gpus"])
            found = predicted[key]
            assert isinstance(found, float)
            rows.append(Row(*key, float(line["throughput_mean"]), found, line["suspect"] == "yes"))
    return rows


def best(rows: list[Row]) -> list[str]:
    """For each model and network: is the best method found, at every number of GPUs, of those that are in the file?"""
    groups: dict[tuple[str, str], dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if not row.suspect:
            groups[row.model, row.network][row.gpus].append(row)
    lines, hits = [], 0
    for (model, network), by_gpus in groups.items():
        found = []
        for group in by_gpus.values():
            chosen = max(group, key=lambda row: row.predicted)
            found.append(chosen.measured >= (1 - CLOSE) * max(row.measured for row in group))
        hits += all(found)
        lines.append(f"{model:10} {network:8} best method of {len(group)} right for {sum(found)} of {len(found)}")
    return [*lines, f"right everywhere in {hits} of {len(groups)} pairs of model and network"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE.csv")
    parser.add_argument("--without-assumptions", action="store_true", help="no waiting for kernels, no interference")
    options = parser.parse_args()
    nothing = quantitative_survey.Assumptions(waits_for_kernels=False, interference_ratio=0.0)
    rows = read(options.file, nothing if options.without_assumptions else quantitative_survey.Assumptions())
    print(f"{'model':10} {'network':8} {'method':18} GPUs  measured predicted   error")
    print("\n".join(row.line() for row in rows))
    counted = [row for row in rows if not row.suspect]
    others = [row for row in counted if not row.calibrated]
    print(f"\nmean absolute error {statistics.fmean(abs(row.error) for row in counted):.1%} of {len(counted)} figures")
    if others:
        errors = [abs(row.error) for row in others]
        mean = statistics.fmean(errors)
        print(f"without those it is calibrated on {mean:.1%} of {len(others)}, at most {max(errors):.1%}")
    print("\n".join(best(rows)))


if __name__ == "__main__":
    main()
