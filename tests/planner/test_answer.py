"""The answer keeps to its limits, names what is not known, and says plain DDP where nothing is gained."""

from __future__ import annotations

import math

import pytest
import torch

from laconic.cluster import Cluster, Link
from laconic.cluster.place import Setting
from laconic.errors import UsageError
from laconic.planner import Answer, Limits, Question, answer
from laconic.planner.candidates import DDP, FSDP, first_candidates, short_name
from laconic.planner.choice import FORMULA_ERROR, Judge, beginning
from laconic.planner.crossovers import cells, ranges
from laconic.planner.islands import as_islands, between_islands
from laconic.planner.verdict_of_rows import verdict_of_rows
from laconic.planner.words import grounds, ranges_in_words, reasons, verdict
from laconic.simulator import simulate
from laconic.simulator.sweep import Sweep
from laconic.strategy import Strategy
from laconic.workload import Workload
from laconic.workload.decoder import DecoderShape
from laconic.workload.devices import device
from laconic.workload.guessed import decoder_workload

SHAPE = DecoderShape(
    blocks=2, width=1024, inner=4096, heads=16, kv_heads=16, vocabulary=8_000, sequence=512, batch=64, gated=False
)
MODEL = decoder_workload("small", SHAPE, device("h200"), dtype=torch.float32, shape_from="made up")


STEPS = 10_000
"""As long as trainings for which the published laws hold."""


def question(
    bandwidth_bps: float = 1e9,
    *,
    hosts: int = 4,
    devices: int = 1,
    inside_bps: float = 3.6e12,
    model: Workload = MODEL,
    text: bool = True,
    **limits,
) -> Question:
    cluster = Cluster(
        links=(Link(bandwidth_bps=bandwidth_bps, delay_s=25e-6),) * hosts,
        devices_per_host=devices,
        inside=Link(bandwidth_bps=inside_bps, delay_s=1e-6) if devices > 1 else None,
    )
    setting = Setting(cluster=cluster, workers=cluster.num_devices, bandwidth_bps=bandwidth_bps)
    return Question(
        workload=model, setting=setting, device=device("h200"), learns_text=text, limits=Limits(**limits), steps=STEPS
    )


FEW = [
    Strategy.parse(text)
    for text in (
        "dear",
        "ddp-bf16",
        "bsp / all_reduce / int8",
        "bsp / all_reduce / terngrad",
        "streaming-diloco-int4",
        "demo-int4",
        "topk-int8-ef",
        "ad-psgd",
        "bsp / all_reduce / none / fusion(bytes=5MiB)",
    )
]
"""Of each kind one: a search of everything takes seconds."""


@pytest.fixture(scope="module")
def slow() -> Answer:
    return answer(question(), among=FEW)


def test_slow_links_want_fewer_bytes_and_the_verdict_says_what_is_gained(slow: Answer) -> None:
    best = slow.best
    assert best.prediction.wire_bytes < slow.baseline.prediction.wire_bytes / 20
    times, low, high = slow.sooner(best)
    assert 1 < low <= times <= high
    assert times == pytest.approx(slow.baseline.seconds / best.seconds)
    said = verdict(slow)
    assert said.startswith("Use ")
    assert f"{times:.3g} times sooner" in said
    assert said.count(". ") == 0, "one sentence"


def test_times_are_steps_times_step_times_steps_needed(slow: Answer) -> None:
    for choice in slow.ranked[:6]:
        assert choice.loss is not None
        alone = simulate(choice.strategy, MODEL, slow.question.setting.cluster).prediction
        # Encoding costs something here, and nothing in a workload of which nobody measured it.
        assert choice.prediction.step_s >= alone.step_s * (1 - 1e-6)
        assert choice.seconds == pytest.approx(STEPS * choice.step_s * choice.loss.ratio)
        assert choice.seconds_low == pytest.approx(STEPS * choice.step_s * choice.loss.ratio_low * (1 - FORMULA_ERROR))
    ranked = [choice.seconds for choice in slow.ranked]
    assert ranked[1:] == sorted(ranked[1:])


def test_a_method_without_a_measured_loss_is_named_and_never_chosen(slow: Answer) -> None:
    names = {short_name(choice.strategy) for choice in slow.unknown}
    assert {"topk-int8-ef", "ad-psgd"} <= names
    assert all(choice.reason for choice in slow.unknown)
    assert not {id(choice) for choice in slow.unknown} & {id(choice) for choice in slow.ranked}


def test_the_best_three_differ_in_more_than_settings_and_say_why(slow: Answer) -> None:
    assert len(slow.top) == 3
    assert slow.top[0] is slow.best
    for choice in slow.top:
        told = " ".join(reasons(choice, slow))
        assert "A step takes" in told
        assert "per step" in told
        assert "Loss" in told or "loss" in told
    assert set(grounds(slow)) == {"measured", "assumed", "not modelled"}


def test_lossless_and_a_loss_gap_are_kept_to() -> None:
    exact = answer(question(lossless=True), among=FEW)
    assert all(choice.loses_nothing for choice in exact.ranked)
    near = answer(question(max_loss_gap=0.01), among=FEW)
    assert all(choice.loss is not None and choice.loss.gap <= 0.01 for choice in near.ranked)
    assert near.best.seconds <= exact.best.seconds
    images = answer(question(text=False), among=FEW)
    assert all(choice.loses_nothing for choice in images.ranked), "losses were measured with text"


def test_inside_one_box_with_nvlink_plain_ddp_is_enough() -> None:
    found = answer(question(hosts=1, devices=8), among=FEW)
    assert found.best is found.baseline
    assert found.baseline.strategy == DDP
    assert verdict(found).startswith("Use plain DDP: no other strategy is predicted")


def test_hosts_with_fast_links_inside_may_be_workers() -> None:
    asked = question(10e9, hosts=2, devices=4)
    hosts = as_islands(asked)
    assert hosts is not None
    inside = simulate(FSDP, MODEL, question(hosts=1, devices=4).setting.cluster).prediction
    assert hosts.workload.compute_s == pytest.approx(inside.step_s)
    assert (hosts.setting.workers, hosts.setting.cluster.links) == (2, asked.setting.cluster.links)
    by_text = {str(choice.strategy): choice for choice in between_islands(hosts)}
    diloco = by_text["diloco / all_reduce / none / fusion"]
    assert diloco.islands
    plain = Judge(asked).choice(Strategy.parse("diloco"))
    assert diloco.loss.gap < plain.loss.gap, "two replicas, not eight"
    assert diloco.memory.total == pytest.approx(plain.memory.total / 4, rel=1e-6)
    assert as_islands(question(hosts=4)) is None
    assert as_islands(question(hosts=1, devices=8)) is None


def test_a_model_that_does_not_fit_is_sharded_or_refused() -> None:
    need = 4 * MODEL.gradient_bytes
    found = answer(question(100e9, hosts=1, devices=8, memory_bytes=need - 1), among=FEW)
    assert found.baseline.strategy == FSDP
    assert all(choice.strategy.architecture.holds_shards for choice in found.ranked)
    with pytest.raises(UsageError, match=r"no strategy fits into 1\.0 MiB of memory per rank; .* needs the least"):
        answer(question(memory_bytes=2**20), among=FEW)


def test_contradictions_are_refused() -> None:
    with pytest.raises(UsageError, match="no effect with --lossless"):
        Limits(lossless=True, max_loss_gap=0.01)
    with pytest.raises(UsageError, match="between 0 and 100%"):
        Limits(max_loss_gap=2.0)
    with pytest.raises(UsageError, match="a single worker exchanges nothing"):
        question(hosts=1)


def test_from_slow_links_to_fast_ones_the_best_loses_ever_less(slow: Answer) -> None:
    bands = ranges(slow, lambda *_: None)
    assert bands[0].from_bps == 0
    assert math.isinf(bands[-1].to_bps)
    assert bands[-1].choice.strategy == DDP, "on links that are fast enough nothing is gained"
    assert [band.to_bps for band in bands[:-1]] == [band.from_bps for band in bands[1:]]
    assert [band.from_bps for band in bands] == sorted(band.from_bps for band in bands)
    here = next(band for band in bands if band.from_bps <= 1e9 < band.to_bps)
    assert Judge(slow.question).choice(here.choice.strategy).seconds == pytest.approx(slow.best.seconds, rel=0.021)
    # At a crossover both take about the same time.
    border = bands[-2].to_bps
    judge = Judge(slow.question.at_bandwidth(border))
    first, second = (judge.choice(band.choice.strategy).seconds for band in bands[-2:])
    assert first == pytest.approx(second, rel=0.15)
    told = ranges_in_words(bands, inside=False)
    assert told[0].startswith("below ")
    assert told[-1].startswith("above ")


def test_steps_of_another_kind_at_the_beginning_count_by_their_share() -> None:
    judge = Judge(question())
    plain, code = (judge.choice(Strategy.parse(text)) for text in ("ddp", "powersgd"))
    warm = judge.choice(Strategy.parse("bsp / all_reduce / powersgd + error_feedback + warmup(steps=2500)"))
    assert warm.step_s == pytest.approx(0.25 * plain.step_s + 0.75 * code.prediction.step_s, rel=0.01)
    share, first = beginning(Strategy.parse("onebit-adam"), STEPS)
    assert (share, str(first.compression)) == (0.1, "int8")


def test_every_candidate_is_legal_and_there_once() -> None:
    for devices in (1, 8):
        texts = [str(strategy) for strategy in first_candidates(question(devices=devices))]
        assert len(texts) == len(set(texts)) > 40
        assert any("between_hosts" in text for text in texts) == (devices > 1)


def test_simulated_rows_get_a_verdict() -> None:
    setting = question().setting
    strategies = tuple(map(Strategy.parse, ("ddp", "topk-int8-ef", "streaming-diloco-int4")))
    rows = list(Sweep(strategies=strategies, workload=MODEL, settings=(setting,)).rows())
    said = verdict_of_rows(rows, MODEL)
    assert "streaming-diloco-int4" in said
    assert "times sooner than plain DDP" in said
    assert verdict_of_rows([], MODEL) == ""


@pytest.mark.slow
def test_following_drawn_steps_gives_the_bands_that_drawing_everything_gives(
    slow: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The crossovers and the map, with islands, against simulating each strategy at each bandwidth from nothing."""
    islands = answer(question(10e9, hosts=2, devices=4), among=FEW)
    quick = [(ranges(found, _quiet), cells(found, [2, 4], _quiet)) for found in (slow, islands)]
    monkeypatch.setattr("laconic.planner.crossovers.Judge", lambda question, drawn: Judge(question))
    monkeypatch.setattr("laconic.planner.crossovers.as_islands", lambda question, drawn: as_islands(question))
    monkeypatch.setattr("laconic.planner.crossovers.between_islands", lambda hosts, drawn: between_islands(hosts))
    for (bands, mapped), found in zip(quick, (slow, islands), strict=True):
        assert bands == ranges(found, _quiet)
        assert mapped == cells(found, [2, 4], _quiet)


def _quiet(done: int, total: int, what: str) -> None:
    """Nobody watches."""
