"""Published tables: what was used is reproduced; where the tables are at hand, errors are as the results page says.

The tables are not part of the project. LACONIC_PUBLISHED_TABLES names a folder with the files that are named below.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from laconic.errors import ConfigurationError
from laconic.simulator.reference.published import Row
from laconic.simulator.reference.rows import Compared, compare, read_rows, summary
from laconic.simulator.reference.tables import published_table

FILES = {
    # name -> file, mean and largest error allowed over the rows that were not used
    "vtrain": ("vtrain_multi_a100.csv", 0.10, 0.55),
    "vtrain-single": ("vtrain_single_a100.csv", 0.08, 0.30),
    "korthikanti": ("korthikanti_table5_a100.csv", 0.05, 0.10),
    "torchtitan": ("torchtitan_h100.csv", 0.15, 0.20),
    "mpt-fsdp": ("mosaic_mpt_fsdp.csv", 0.06, 0.30),
    "megatron-a100": ("megatron_sc21_a100_weak_scaling.csv", 0.04, 0.04),
    "megatron-h100": ("megatron_h100_weak_scaling.csv", 0.05, 0.05),
}
USED_EXACTLY = {
    "vtrain": 1e-6,
    "korthikanti": 1e-6,
    "megatron-a100": 1e-3,
    "megatron-h100": 1e-3,
    "megascale": 1e-6,
    "qwen3-moe": 1e-6,
    "zero3": 0.06,
    "torchtitan": 0.03,
    "mpt-fsdp": 0.10,
    "vtrain-single": 0.20,
}
"""How far the rows that a table carries may be off: nothing where one number was found from one row."""


@pytest.mark.parametrize("name", USED_EXACTLY)
def test_rows_that_were_used_come_out(name: str) -> None:
    table = published_table(name)
    for row in compare(table, [Row(cells) for cells in table.carried_rows()]):
        assert abs(row.errors[table.measured[0]]) <= USED_EXACTLY[name], row


@pytest.mark.parametrize("name", USED_EXACTLY)
def test_a_cell_that_is_wrong_is_named(name: str) -> None:
    table = published_table(name)
    column = next(column for column in ("gpus", "hidden") if column in table.columns)
    with pytest.raises(ConfigurationError, match=f"line 7.*{column}|line 7.*GPUs"):
        table.predict(Row({**table.carried_rows()[0], column: "-3"}, "rows.csv, line 7"))


def _tables() -> Path:
    folder = os.environ.get("LACONIC_PUBLISHED_TABLES", "")
    if not folder:
        pytest.skip("LACONIC_PUBLISHED_TABLES is not set: the published tables are not part of the project")
    return Path(folder)


def _held_out(name: str) -> list[Compared]:
    table = published_table(name)
    rows = read_rows(_tables() / FILES[name][0], table)
    used = [tuple(cells[column] for column in table.columns) for cells in table.carried_rows()]
    if name == "vtrain-single":
        rows = [row for index, row in enumerate(rows) if index % 10]
    return compare(table, [row for row in rows if tuple(row[column] for column in table.columns) not in used])


@pytest.mark.parametrize("name", FILES)
def test_rows_that_were_not_used_are_predicted(name: str) -> None:
    found = summary(_held_out(name), published_table(name).measured[0])
    assert found is not None
    _, mean, largest = FILES[name]
    assert found.mean <= mean
    assert found.largest <= largest


def test_the_plan_predicted_fastest_is_nearly_the_fastest() -> None:
    found = _held_out("vtrain")
    for size in ("3.6", "18.4"):
        rows = [row for row in found if row.row["params_b"] == size]
        chosen = min(rows, key=lambda row: row.predicted["iteration_ms"])
        fastest = min(row.row.number("iteration_ms") for row in rows)
        assert chosen.row.number("iteration_ms") <= 1.05 * fastest


def test_memory_of_torchtitan() -> None:
    found = summary(_held_out("torchtitan"), "memory_gib")
    assert found is not None
    assert found.largest <= 0.15


def test_serving_is_predicted_as_the_results_page_says() -> None:
    """Aggregated rows without every tenth one, which the constants were fitted to."""
    table = published_table("serving")
    file = _tables() / "aiconfigurator_silicon_inference.csv"
    if not file.exists():
        pytest.skip(f"{file} is not there")
    rows = read_rows(file, table)
    together = [row for row in rows if row["mode"] == "agg"]
    found = compare(table, [row for index, row in enumerate(together) if index % 10])
    for column, median in (("silicon_ttft_ms", 0.21), ("silicon_tpot_ms", 0.14)):
        errors = summary(found, column)
        assert errors is not None
        assert errors.median <= median


@pytest.mark.parametrize(("model", "gpu", "gpus"), [("70b", "a100_40gb", 512), ("1b", "h100_80gb", 8)])
@pytest.mark.parametrize("grad_accum", [1, 8])
def test_sharding_less_saves_one_gather_of_three_exchanges(model: str, gpu: str, gpus: int, grad_accum: int) -> None:
    table = published_table("mpt-fsdp")
    cells = {"model": model, "seq": "2048", "gpus": str(gpus), "gpu": gpu, "micro_batch": "2"}
    cells |= {"grad_accum": str(grad_accum), "precision": "amp_bf16", "act_ckpt": "True"}
    whole, part = (table.predict(Row({**cells, "sharding": kind})) for kind in ("FULL_SHARD", "SHARD_GRAD_OP"))
    assert 1 < part["mfu_pct"] / whole["mfu_pct"] < 1.2
