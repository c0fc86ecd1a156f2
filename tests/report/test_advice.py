"""The sentence that says which strategy has torch DDP's loss soonest."""

from __future__ import annotations

import pytest

from laconic.losses.measured import GPT2, SMALL, TINY
from laconic.losses.steps_needed import steps_needed
from laconic.report.advice import advise
from laconic.report.results import TORCH_DDP, Row
from laconic.strategy import Strategy

SAME = "bsp / all_reduce / none / wfbp"
INT8 = "bsp / all_reduce / int8 / fusion"
TOPK = "bsp / all_reduce / topk + error_feedback / fusion"
SIGNS = "bsp / all_reduce / signsgd / fusion"
UNKNOWN = "bsp / all_reduce / topk(density=0.3) + error_feedback / fusion"


def row(strategy: str, step_ms: float, *, link: str = "100mbit", sent: int = 1000, spread: float = 0.0) -> Row:
    return Row(
        strategy=strategy,
        name=strategy,
        link=link,
        links="shaped",
        steps=20,
        step_ms=step_ms,
        step_ms_low=step_ms * (1 - spread),
        step_ms_high=step_ms * (1 + spread),
        compute_ms=10,
        encode_ms=0,
        exposed_ms=step_ms - 10,
        wire_bytes_per_step=sent,
        wire_bytes_source="kernel",
        counted_bytes_per_step=1,
        predicted_bytes_per_step=1,
        final_loss=2.0,
        loss_at_equal_steps=2.0,
        seconds_to_target=None,
        speedup_over_ddp=100 / step_ms,
    )


DDP = row(TORCH_DDP, 100)


def test_what_computes_the_same_is_as_much_sooner_as_its_steps_are_shorter() -> None:
    for size in (SMALL, None):
        (sentence,) = advise([DDP, row(SAME, 50)], gpt_parameters=size)
        assert sentence == f"On 100mbit links {SAME} reaches torch DDP's loss 2.0 times sooner (2.0 to 2.0)."


def test_steps_that_lose_something_count_for_less() -> None:
    needed = steps_needed(Strategy.parse(TOPK))
    assert needed is not None
    assert needed.low > 1.0
    (sentence,) = advise([DDP, row(TOPK, 10, sent=10)], gpt_parameters=SMALL)
    assert f"reaches torch DDP's loss {10 / needed.ratio:.1f} times sooner" in sentence
    assert f"({10 / needed.high:.1f} to {10 / needed.low:.1f})" in sentence
    assert "fewer bytes" not in sentence, "its loss is not the same at equal steps"


def test_what_is_not_told_apart_by_seeds_counts_as_the_same() -> None:
    needed = steps_needed(Strategy.parse(SIGNS))
    assert needed is not None
    assert needed.ratio != 1.0
    (sentence,) = advise([DDP, row(SIGNS, 25, sent=250)], gpt_parameters=SMALL)
    assert "reaches torch DDP's loss 4.0 times sooner" in sentence
    assert " and sends 4.0 times fewer bytes at the same loss" in sentence


def test_what_is_surely_sooner_comes_before_what_may_be_soonest() -> None:
    powersgd = "bsp / all_reduce / powersgd + error_feedback"
    needed = steps_needed(Strategy.parse(powersgd))
    assert needed is not None
    step_ms = 100 / (1.2 * needed.high)  # surely 1.2 times sooner, and more by the figure
    assert 100 / (step_ms * needed.ratio) > 2.5
    (sentence,) = advise([DDP, row(powersgd, step_ms), row(SAME, 50)], gpt_parameters=SMALL)
    assert f"{SAME} reaches torch DDP's loss 2.0 times sooner" in sentence
    assert f"; {powersgd} is {100 / step_ms:.1f}x as fast per step and needs" in sentence


def test_losses_of_larger_models_count_for_them_only() -> None:
    demo = [DDP, row("demo / all_reduce / dct_topk(density=0.03125) + chain(second=int4)", 25, sent=20)]
    for size in (TINY, SMALL):
        assert "sends 50.0 times fewer bytes at the same loss" in advise(demo, gpt_parameters=size)[0]
    assert "at the same loss" not in advise(demo, gpt_parameters=GPT2)[0], "it ended 1.7% higher"


def test_who_sends_least_at_the_same_loss_is_named_beside_who_is_soonest() -> None:
    (sentence,) = advise([DDP, row(INT8, 25, sent=250), row(SAME, 10)], gpt_parameters=SMALL)
    assert f"{SAME} reaches torch DDP's loss 10.0 times sooner" in sentence
    assert f", {INT8} sends 4.0 times fewer bytes at the same loss" in sentence


def test_what_was_not_measured_is_mentioned_and_not_recommended() -> None:
    (sentence,) = advise([DDP, row(SAME, 50), row(UNKNOWN, 10)], gpt_parameters=SMALL)
    assert f"{SAME} reaches torch DDP's loss 2.0 times sooner" in sentence
    assert sentence.endswith(f"{UNKNOWN} is 10.0x as fast per step, and how many steps it needs was not measured.")


def test_what_was_measured_on_text_says_nothing_about_other_work() -> None:
    (sentence,) = advise([DDP, row(INT8, 25)], gpt_parameters=None)
    assert "no strategy here is known to reach torch DDP's loss clearly sooner" in sentence
    assert "how many steps it needs was not measured" in sentence


def test_the_range_holds_the_spread_of_both_step_times() -> None:
    (sentence,) = advise([row(TORCH_DDP, 100, spread=0.1), row(SAME, 50, spread=0.2)], gpt_parameters=SMALL)
    assert "2.0 times sooner (1.5 to 2.8)" in sentence


@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_no_advice_to_leave_ddp_for_noise(spread: float) -> None:
    (sentence,) = advise([DDP, row(SAME, 99 if spread == 0.0 else 80, spread=spread)], gpt_parameters=SMALL)
    assert "no strategy here is known to reach torch DDP's loss clearly sooner than torch DDP itself" in sentence


def test_one_sentence_per_link_and_none_without_a_baseline() -> None:
    both = [DDP, row(SAME, 50), row(TORCH_DDP, 100, link="1gbit"), row(SAME, 99, link="1gbit")]
    assert len(advise(both, gpt_parameters=SMALL)) == 2
    assert advise([row(SAME, 50)], gpt_parameters=SMALL) == []
