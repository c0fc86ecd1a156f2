"""Fit the times of collective operations again from a published table, and print how well they predict.

    python -m benchmarks.fit_collectives aiconfigurator_nccl.csv                      # print the errors
    python -m benchmarks.fit_collectives aiconfigurator_nccl.csv --write FILE.json    # and write what was fitted
    python -m benchmarks.fit_collectives vtrain_allreduce_lut.csv --measured 2,4      # 3 and 5 to 8 GPUs from 2 and 4

The table has the columns system, library, op, gpus, bytes and latency_ms, or those of vTrain's all-reduces (gpu, gpus,
bytes, time_ns_oop); lines that begin with # are comments. Every second size is kept, the smallest first. Two kinds of
error are printed: at the sizes in between, and for numbers of GPUs that are predicted from the measured ones: those of
--measured, or all but the largest.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from laconic.cluster.collective_costs import CollectiveCosts, SizeCurve, System
from laconic.cluster.collective_costs.systems import FACTS, SystemFacts

NAMES = {"alltoall": "all_to_all"}
Times = dict[str, dict[str, dict[int, dict[int, float]]]]
"""system -> operation -> GPUs -> bytes -> microseconds."""


def bytes_of(library: str, operation: str, gpus: int, nbytes: int) -> int:
    """The bytes that operations.py counts: oneCCL's benchmark gives those of one rank for an all-gather."""
    return nbytes * gpus if library.startswith("oneccl") and operation == "all_gather" else nbytes


def read(path: str) -> Times:
    """The table, with the names and bytes of this library."""
    times: Times = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    with Path(path).open(encoding="utf-8") as lines:
        for row in csv.DictReader(line for line in lines if not line.startswith("#")):
            if "time_ns_oop" in row:
                times[row["gpu"]]["all_reduce"][int(row["gpus"])][int(row["bytes"])] = float(row["time_ns_oop"]) / 1e3
                continue
            operation, gpus = NAMES.get(row["op"], row["op"]), int(row["gpus"])
            nbytes = bytes_of(row["library"], operation, gpus, int(row["bytes"]))
            times[row["system"]][operation][gpus][nbytes] = float(row["latency_ms"]) * 1e3
    return times


def fitted(by_size: dict[int, float]) -> SizeCurve:
    """The curve through every second size."""
    sizes = sorted(by_size)[::2]
    return SizeCurve.fitted(sizes, [1e-6 * by_size[size] for size in sizes])


def document(times: Times, source: str) -> dict[str, object]:
    """What systems.json holds: system -> operation -> GPUs -> smallest size -> microseconds at 4, 16, ... times it."""
    found: dict[str, object] = {}
    for name, operations in times.items():
        found[name] = {
            operation: {
                gpus: {min(by_size): [round(1e6 * time, 2) for time in fitted(by_size).seconds]}
                for gpus, by_size in by_gpus.items()
            }
            for operation, by_gpus in operations.items()
        }
    return {"source": source, "systems": found}


def print_errors(times: Times, counts: Sequence[int]) -> None:
    """Held-out errors, by system and altogether; `counts` are the numbers of GPUs that others are predicted from."""
    between, beyond = defaultdict(list), defaultdict(list)
    for name, operations in times.items():
        facts = FACTS.get(name, SystemFacts(0.0, None))
        for operation, by_gpus in operations.items():
            for by_size in by_gpus.values():
                curve = fitted(by_size)
                for size in sorted(by_size)[1::2]:
                    between[name].append(abs(1e6 * curve.at(size) / by_size[size] - 1))
            kept = [gpus for gpus in by_gpus if gpus in counts] if counts else sorted(by_gpus)[:-1]
            if len(kept) < 2:
                continue
            curves = {operation: {gpus: fitted(by_gpus[gpus]) for gpus in kept}}
            costs = CollectiveCosts(System(name=name, curves=curves, in_switch_ratio=facts.in_switch_ratio))
            for gpus in by_gpus:
                for size, measured_us in by_gpus[gpus].items() if gpus not in kept else ():
                    error = abs(1e6 * costs.seconds(operation, size, gpus) / measured_us - 1)
                    beyond[f"{name}, {gpus} GPUs"].append(error)
    for what, errors in (("sizes in between", between), ("other numbers of GPUs", beyond)):
        for name, values in errors.items():
            median, mean = statistics.median(values), statistics.fmean(values)
            print(f"{what:24s} {name:24s} median {median:6.1%}  mean {mean:6.1%}  ({len(values)} points)")
        everything = [value for values in errors.values() for value in values]
        if everything:
            print(f"{what:24s} {'all':24s} median {statistics.median(everything):6.1%}  ({len(everything)} points)")


def main() -> None:
    """Read, print the errors, write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file")
    parser.add_argument("--measured", metavar="N,N", default="", help="numbers of GPUs that others are predicted from")
    parser.add_argument("--write", metavar="FILE.json")
    options = parser.parse_args()
    times = read(options.file)
    print_errors(times, [int(count) for count in options.measured.split(",") if count])
    if options.write:
        source = (
            "NVIDIA aiconfigurator (github.com/ai-dynamo/aiconfigurator, Apache-2.0), nccl_perf and oneccl_perf of "
            "one node, half precision, out of place"
        )
        text = json.dumps(document(times, source)).replace('"systems": ', '\n"systems": ')
        for closing, indent in (("}}}, ", ""), ("}}, ", " "), ("}, ", "  ")):  # a line for every curve
            text = text.replace(closing, f"{closing.rstrip()}\n{indent}")
        Path(options.write).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
