"""The sentence that says which strategy to use."""

from __future__ import annotations

from laconic.report.advice import advise
from laconic.report.results import TORCH_DDP, Row


def row(strategy: str, step_ms: float, loss: float | None, *, link: str = "100mbit") -> Row:
    return Row(
        strategy=strategy,
        name=strategy,
        link=link,
        links="shaped",
        steps=20,
        step_ms=step_ms,
        step_ms_low=step_ms,
        step_ms_high=step_ms,
        compute_ms=10,
        encode_ms=0,
        exposed_ms=step_ms - 10,
        wire_bytes_per_step=1,
        wire_bytes_source="kernel",
        counted_bytes_per_step=1,
        predicted_bytes_per_step=1,
        final_loss=loss,
        loss_at_equal_steps=loss,
        seconds_to_target=None,
        speedup_over_ddp=100 / step_ms,
    )


DDP = row(TORCH_DDP, 100, 2.0)


def test_the_fastest_that_trains_the_same_is_named_with_its_cost() -> None:
    (sentence,) = advise([DDP, row("half", 60, 2.01), row("plain", 90, 2.0)])
    assert sentence == (
        "On 100mbit links use half: 1.67x as fast per step as torch DDP, with the loss +0.5% after 20 steps."
    )


def test_a_faster_one_that_trains_worse_is_mentioned_not_recommended() -> None:
    (sentence,) = advise([DDP, row("plain", 90, 2.0), row("wild", 10, 3.0)])
    assert "use plain: 1.11x as fast per step as torch DDP, at the same loss after 20 steps" in sentence
    assert "wild is 10.00x as fast, with the loss +50.0%" in sentence


def test_no_advice_to_leave_ddp_for_noise() -> None:
    (sentence,) = advise([DDP, row("plain", 99, 2.0)])
    assert "nothing that trains the same is clearly faster than torch DDP" in sentence


def test_one_sentence_per_link_and_none_without_a_baseline() -> None:
    both = [DDP, row("a", 50, 2.0), row(TORCH_DDP, 100, 2.0, link="1gbit"), row("a", 99, 2.0, link="1gbit")]
    assert len(advise(both)) == 2
    assert advise([row("a", 50, 2.0)]) == []


def test_replayed_compute_has_no_loss_to_speak_of() -> None:
    (sentence,) = advise([row(TORCH_DDP, 100, None), row("a", 50, None)])
    assert sentence == "On 100mbit links use a: 2.00x as fast per step as torch DDP."
