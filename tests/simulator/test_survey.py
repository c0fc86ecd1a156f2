"""The survey's table: every cell there, what it was calibrated on reproduced, and nothing else used."""

from __future__ import annotations

from collections import Counter

import pytest

from laconic.simulator.reference import quantitative_survey
from laconic.simulator.reference.quantitative_survey import METHODS, offsets, table, throughput
from laconic.simulator.reference.survey_figures import GPUS, MODELS, NETWORKS, THROUGHPUT
from laconic.strategy import Strategy


def test_every_cell_is_in_the_table_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantitative_survey, "throughput", lambda *cell: cell[:4])
    rows = table()
    assert len(rows) == 252
    cells = [(row["model"], row["network"], row["method"], row["gpus"]) for row in rows]
    assert len(set(cells)) == 252 == len(MODELS) * len(NETWORKS) * len(METHODS) * len(GPUS)
    assert [row["throughput"] for row in rows] == cells, "each is asked for by what it says it is"
    assert all(list(row) == ["model", "network", "method", "gpus", "throughput"] for row in rows)
    assert Counter(method for _, _, method, _ in cells) == dict.fromkeys(METHODS, 36)


@pytest.mark.parametrize("model", MODELS)
def test_what_it_was_calibrated_on_comes_out(model: str) -> None:
    checked = 0
    for (of, network, method), figures in THROUGHPUT.items():
        for gpus, measured in zip(GPUS, figures, strict=True):
            if of == model and measured is not None:
                assert throughput(model, network, method, gpus) == pytest.approx(measured, rel=1e-6)
                checked += 1
    # Two methods on three networks, without the cells in which networks were mixed up.
    assert checked == (24 if model == "BERT-Base" else 21)


def test_only_one_exchange_after_the_backward_pass_was_used() -> None:
    """Figures of other methods are predicted, so none is in the tables that come with it."""
    assert {method for _, _, method in THROUGHPUT} == {"BSP-A2A", "BSP-PS"}
    assert all(len(figures) == len(GPUS) for figures in THROUGHPUT.values())
    assert set(offsets()) == set(MODELS)


def test_methods_are_strategies_of_this_library() -> None:
    for text in METHODS.values():
        strategy = Strategy.parse(text)
        assert strategy.compression.traits.lossless
        assert strategy.exchanges_gradients()


@pytest.mark.parametrize("method", [method for method in METHODS if not method.startswith("BSP")])
def test_other_methods_are_predicted(method: str) -> None:
    few, many = (throughput("ResNet-50", "10GbE", method, gpus) for gpus in (8, 32))
    assert 0 < few < many, "more GPUs, more samples"
    sequential = "BSP-PS" if method.endswith("-PS") else "BSP-A2A"
    if method != "WFBP-A2A":  # which pays for the start-up of 161 all-reduces
        assert many > throughput("ResNet-50", "10GbE", sequential, 32), "overlap helps where the network is slow"
    alone = 253.1  # samples per second of one GPU, as the survey has it
    assert many < 32 * alone
