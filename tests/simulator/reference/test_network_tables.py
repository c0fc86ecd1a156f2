"""Published tables of collectives, DiLoCo and serving: closed formulas, and errors on the files where they are given.

LACONIC_REFERENCE_TABLES names a folder with the published files; without it the comparisons with them are skipped.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import pytest

from laconic.errors import ConfigurationError
from laconic.simulator.reference.diloco_utilization import GRID_GBIT, Exchange, printed_gbit
from laconic.simulator.reference.intellect1 import all_reduce_s
from laconic.simulator.reference.published import Row
from laconic.simulator.reference.rows import Compared, compare, read_rows, summary
from laconic.simulator.reference.tables import published_table


def given_rows(name: str, file: str) -> list[Compared]:
    folder = os.environ.get("LACONIC_REFERENCE_TABLES", "")
    path = Path(folder) / file
    if not folder or not path.is_file():
        pytest.skip("set LACONIC_REFERENCE_TABLES to the folder with the published tables")
    table = published_table(name)
    return compare(table, read_rows(path, table))


def median(rows: list[Compared], column: str) -> float:
    found = summary(rows, column)
    assert found is not None
    return found.median


def test_data_parallelism_waits_for_what_the_backward_pass_does_not_hide() -> None:
    step_s, layers, bits = 0.3, 10, 16e9
    exchange = Exchange(parameters=1e9, layers=layers, step_s=step_s, period=1)
    slow_bps = bits / 3.0
    # The first gradient is there after the forward pass and one layer of the backward pass.
    assert step_s / exchange.utilization(slow_bps) == pytest.approx(step_s / 3 + 2 * step_s / 3 / layers + 3.0)
    fast_bps = bits / 0.1
    assert step_s / exchange.utilization(fast_bps) == pytest.approx(step_s + 0.1 / layers)
    assert exchange.utilization(exchange.needed_bps(0.9)) == pytest.approx(0.9)


def test_longer_rounds_fragments_overlap_and_fewer_bits_each_need_less_bandwidth() -> None:
    shape = {"parameters": 1e9, "layers": 24, "step_s": 0.1}
    chain = [
        Exchange(**shape, period=1),
        Exchange(**shape, period=100),
        Exchange(**shape, period=100, fragment_layers=3),
        Exchange(**shape, period=100, fragment_layers=3, overlapped="inner"),
        Exchange(**shape, period=100, fragment_layers=3, overlapped="inner", bits=4.0),
    ]
    needed = [exchange.needed_bps(0.95) for exchange in chain]
    assert needed == sorted(needed, reverse=True)


def test_bandwidths_are_printed_as_the_papers_do() -> None:
    assert [printed_gbit(1e9 * value) for value in (86.86, 6.26, 1.16, 0.96, 2.95, 0.01, 1e6)] == [
        *(86.8, 6.2, 1.1, 0.9, 3.0, 0.1),
        GRID_GBIT[-1],
    ]


def test_intellect_1_by_hand() -> None:
    assert all_reduce_s(0.5e9) == pytest.approx(2 * 13 / 14 * 10e9 * 8 / 0.5e9 * 1538 / 1448)


@pytest.mark.parametrize(
    ("name", "cells", "expected"),
    [
        ("nccl", {"system": "h100", "library": "nccl", "op": "all_reduce", "gpus": "8", "bytes": "1"}, "h100_sxm"),
        ("diloco-utilization", {"model": "big", "layers": "2", "step_s": "1", "method": "DiLoCo", "H": "1"}, "10B"),
        (
            "diloco-utilization",
            {"model": "1B", "layers": "2", "step_s": "1", "method": "Gossip", "H": "1"},
            "Data-Parallel, DiLoCo or Streaming",
        ),
        (
            "splitwise",
            {
                **{"model": "llama2-70b", "hardware": "a100-80gb", "tensor_parallel": "3"},
                **{"prompt_size": "1", "batch_size": "1", "token_size": "1"},
            },
            "3 does not divide 64 heads",
        ),
    ],
)
def test_rows_that_cannot_be_predicted_say_why(name: str, cells: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        published_table(name).predict(Row(cells))
    assert expected in str(caught.value)


def test_collectives_on_the_given_rows() -> None:
    rows = given_rows("nccl", "collectives/aiconfigurator_nccl.csv")
    between = [abs(row.errors["latency_ms"]) for row in rows if int(row.row["bytes"]).bit_length() % 2]
    assert statistics.median(between) <= 0.04
    rows = given_rows("deepep", "collectives/aiconfigurator_deepep_normal_multinode.csv")
    large = [row for row in rows if int(row.row["tokens"]) >= 1024]
    assert max(median(large, column) for column in ("dispatch_us", "combine_us")) <= 0.05


def test_diloco_on_the_given_rows() -> None:
    rows = given_rows("diloco-utilization", "diloco/diloco_bandwidth_for_utilization.csv")
    errors = [abs(error) for row in rows for error in row.errors.values()]
    assert statistics.fmean(error <= 0.21 for error in errors) >= 0.9
    for row in given_rows("intellect-1", "diloco/intellect1_regions.csv"):
        assert abs(row.predicted["compute_utilization_pct"] - row.row.number("compute_utilization_pct")) <= 5


def test_serving_on_the_given_rows() -> None:
    rows = given_rows("splitwise", "inference/splitwise_perf.csv")
    assert median(rows, "prompt_time") <= 0.12
    assert median(rows, "token_time") <= 0.05
    rows = given_rows("serving", "inference/aiconfigurator_silicon_inference.csv")
    assert median([row for row in rows if row.row["mode"] == "agg"], "silicon_tpot_ms") <= 0.2
