"""How far predictions of large models are from published tables: all rows, and those that were not used.

python -m benchmarks.large_models FOLDER

FOLDER holds the tables as CSV files; they are not part of the project. One line per table and measured column: rows,
mean, median and largest |predicted / measured - 1|; then whether the plan predicted fastest is the fastest (vTrain),
what FSDP loses from one node to two (MPT), and the steps of long sequences with context parallelism (torchtitan).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from laconic.simulator.reference.published import PublishedTable
from laconic.simulator.reference.rows import Compared, compare, read_rows, summary
from laconic.simulator.reference.tables import published_table

FILES = {
    "vtrain": "vtrain_multi_a100",
    "vtrain-single": "vtrain_single_a100",
    "korthikanti": "korthikanti_table5_a100",
    "torchtitan": "torchtitan_h100",
    "mpt-fsdp": "mosaic_mpt_fsdp",
    "zero3": "megatron_sc21_ptdp_vs_zero3",
    "megatron-a100": "megatron_sc21_a100_weak_scaling",
    "megatron-h100": "megatron_h100_weak_scaling",
    "megascale": "megascale_175b_strong_scaling",
    "qwen3-moe": "moe_zoo_qwen3_h100",
}
_SHOWN = {"torchtitan": 2}
"""Measured columns to show; of most tables the others follow from the first."""
_FIT_EVERY = 10
"""vtrain-single: every tenth row was used, more than the table carries."""


def unused(table: PublishedTable, found: Sequence[Compared]) -> list[Compared]:
    """Rows that no number was found from."""
    if table.name == "vtrain-single":
        return [row for index, row in enumerate(found) if index % _FIT_EVERY]
    used = [tuple(cells[column] for column in table.columns) for cells in table.carried_rows()]
    return [row for row in found if tuple(row.row[column] for column in table.columns) not in used]


def main(folder: Path) -> None:
    """Print the tables."""
    results: dict[str, list[Compared]] = {}
    for name, file in FILES.items():
        table = published_table(name)
        results[name] = compare(table, read_rows(folder / f"{file}.csv", table))
        for column in table.measured[: _SHOWN.get(name, 1)]:
            for words, rows in (("all", results[name]), ("not used", unused(table, results[name]))):
                errors = summary(rows, column)
                if errors is not None:
                    parts = f"{errors.mean:6.1%} {errors.median:6.1%} {errors.largest:6.1%}"
                    print(f"{name:14} {column:15} {words:9} {errors.count:5} {parts}")
    _fastest(results["vtrain"])
    _scaling(results["mpt-fsdp"])
    _long_sequences(results["torchtitan"])


def _fastest(rows: Sequence[Compared]) -> None:
    for size in sorted({row.row["params_b"] for row in rows}, key=float):
        same = [row for row in rows if row.row["params_b"] == size]
        chosen = min(same, key=lambda row: row.predicted["iteration_ms"]).row
        fastest = min(row.row.number("iteration_ms") for row in same)
        slower = chosen.number("iteration_ms") / fastest - 1
        plan = " ".join(f"{key}={chosen[key]}" for key in ("dp", "tp", "pp", "micro_batch"))
        print(f"vtrain {size}B: predicted fastest {plan}, measured {slower:.1%} slower than the fastest")


def _scaling(rows: Sequence[Compared]) -> None:
    for row in rows:
        if row.row["gpus"] != "16":
            continue
        for one in rows:
            same = all(one.row[key] == row.row[key] for key in ("model", "seq", "gpu", "precision", "act_ckpt"))
            if same and one.row["gpus"] == "8":
                measured = one.row.number("mfu_pct") - row.row.number("mfu_pct")
                predicted = one.predicted["mfu_pct"] - row.predicted["mfu_pct"]
                print(
                    f"mpt-fsdp {row.row['gpu']} {row.row['model']:5} points of MFU lost from 8 to 16 GPUs: measured "
                    f"{measured:5.2f}, predicted {predicted:5.2f}"
                )


def _long_sequences(rows: Sequence[Compared]) -> None:
    """Rows with the same tokens on each GPU: only attention grows, by the same time for every further rank.

    That holds whether ranks have equal parts of causal attention (cp units of work) or consecutive ones (2 cp - 1).
    """
    column = published_table("torchtitan").measured[0]
    long = sorted((row for row in rows if row.row["act_ckpt"] == "full"), key=lambda row: row.row.whole("cp"))
    tokens = [row.row.whole("seq") / row.row.whole("cp") * row.row.whole("local_batch") for row in long]
    measured = {row.row.whole("cp"): count / row.row.number(column) for row, count in zip(long, tokens, strict=True)}
    if len(measured) < 3 or len(set(tokens)) > 1:
        return
    least, most = min(measured), max(measured)
    each_s = (measured[most] - measured[least]) / (most - least)
    for row, count in zip(long, tokens, strict=True):
        cp = row.row.whole("cp")
        line_s = measured[least] + each_s * (cp - least)
        predicted_s = count / row.predicted[column]
        print(
            f"torchtitan cp={cp}: step measured {measured[cp]:5.2f} s, predicted {predicted_s:5.2f} s, "
            f"line through cp={least} and cp={most} {line_s:5.2f} s ({line_s / measured[cp] - 1:+.1%})"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
