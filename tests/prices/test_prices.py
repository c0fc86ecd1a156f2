"""Costs of encoding are those of the page of measured kernels; memory is what a formula of a few lines says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from laconic.prices.codec_costs import (
    CPU_KERNELS,
    CPU_SELECTIONS,
    H200_KERNELS,
    H200_SELECTIONS,
    codec_cost,
    known_codecs,
)
from laconic.prices.memory import memory_of
from laconic.strategy import Strategy
from laconic.workload import workload
from laconic.workload.devices import DEVICES, device

PAGE = (Path(__file__).parents[2] / "docs" / "results" / "kernels.md").read_text(encoding="utf-8")
GPU_PAGE, CPU_PAGE = PAGE.split("## CPU")


def compressor(text: str):
    return Strategy.parse(f"bsp / all_reduce / {text}").compression


@pytest.mark.parametrize(
    ("page", "kernels", "selections"),
    [(GPU_PAGE, H200_KERNELS, H200_SELECTIONS), (CPU_PAGE, CPU_KERNELS, CPU_SELECTIONS)],
    ids=["h200", "cpu"],
)
def test_kernels_are_those_of_the_page(page: str, kernels: dict, selections: dict) -> None:
    printed_rows = re.findall(r"^(\w+(?:\(.*?\))?) +([0-9.]+) +([0-9.]+) +[0-9.]+ ", page, re.MULTILINE)
    rows = {name: (float(encode), float(decode)) for name, encode, decode in printed_rows}
    for name, times in kernels.items():
        printed = {"bf16": "fp16" if page is GPU_PAGE else "bf16(rounding=stochastic)"}.get(name, name)
        assert rows[printed] == times, name
    exact = re.search(r"^exact \(topk, gtopk, dgc\) +([0-9.]+)", page, re.MULTILINE)
    estimated = re.search(r"^estimated \(sidco\) +([0-9.]+)", page, re.MULTILINE)
    assert exact is not None
    assert estimated is not None
    assert (selections["topk"], selections["sidco"]) == (float(exact[1]), float(estimated[1]))
    if page is GPU_PAGE:
        labels = ("adacomp", "sketch, cells", "sketch, estimates")
        found = [re.search(rf"^{label}  +([0-9.]+)", page, re.MULTILINE) for label in labels]
        adacomp, cells, estimates = (float(each[1]) for each in found if each is not None)
        assert selections["adacomp"] == adacomp
        assert selections["sketch"] == pytest.approx(cells + estimates + float(exact[1]))


def test_a_line_through_what_was_measured_with_wrappers_as_copies() -> None:
    plain = codec_cost(compressor("int8"), device("h200"))
    wrapped = codec_cost(compressor("int8 + error_feedback"), device("h200"))
    assert plain is not None
    assert wrapped is not None
    nbytes = 100_000_000
    assert nbytes * plain.encode_byte_s == pytest.approx(0.0359e-3)
    assert nbytes * plain.decode_byte_s == pytest.approx(0.0370e-3)
    assert nbytes * (wrapped.encode_byte_s - plain.encode_byte_s) == pytest.approx(3 * 0.0524e-3)
    slower = codec_cost(compressor("int8"), device("rtx-4090"))
    assert slower is not None
    assert slower.encode_byte_s / plain.encode_byte_s == pytest.approx(4800 / 1008)


def test_what_was_not_measured_has_no_price() -> None:
    for text in ("randomk + error_feedback", "int8(rounding=stochastic)", "dct_topk + error_feedback"):
        assert codec_cost(compressor(text), None) is None
    assert known_codecs([compressor("none"), compressor("randomk + error_feedback")], device("h200")) == ()


@pytest.mark.parametrize("name", DEVICES)
def test_devices_have_plausible_peaks(name: str) -> None:
    found = device(name)
    assert 10 < found.peaks.flops_per_s / found.peaks.memory_bytes_per_s < 1000
    assert found.memory_bytes >= 10 * 10**9


def test_memory_by_hand() -> None:
    job = workload("gpt2")
    size = job.gradient_bytes
    assert memory_of(Strategy.parse("ddp"), job, 4).total == 4 * size
    assert memory_of(Strategy.parse("sign-ef"), job, 4).strategy >= size, "a residual as large as the gradients"
    sharded = memory_of(Strategy.parse("bsp / sharded / none"), job, 4)
    # The embeddings are the largest part.
    assert sharded.total == size + 2 * 4 * 768 * (50257 + 1024)
