"""The replayed benchmark: queues that can be counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.errors import ConfigurationError
from laconic.simulator.serving.closed_loop import Passes, interpolated, replay
from laconic.simulator.serving.load import Load

PROMPT_S, TOKEN_S = 0.5, 0.01
ALIKE = Passes(
    prompt_s=lambda tokens: PROMPT_S,
    output_s=lambda sequences: TOKEN_S,
    mixed_sequence_s=0.0,
    tokens_per_pass=100,
    mixes=False,
)
"""Every prompt is a pass of its own."""


def test_one_client_waits_for_nobody() -> None:
    found = replay(1, Load(input_tokens=100, output_tokens=20), 1, ALIKE)
    assert found.first_s == pytest.approx(PROMPT_S)
    assert found.token_s == pytest.approx(TOKEN_S)


@settings(max_examples=30, deadline=None)
@given(clients=st.integers(1, 40), rounds=st.integers(1, 6))
def test_prompts_alone_queue_for_each_other(clients: int, rounds: int) -> None:
    """Answers of one token: at first half of all clients are before one, later all of them."""
    load = Load(input_tokens=100, output_tokens=1, concurrency=clients, requests_per_client=rounds)
    expected = PROMPT_S * ((clients + 1) / 2 + (rounds - 1) * clients) / rounds
    assert replay(clients, load, clients, ALIKE).first_s == pytest.approx(expected)


def test_a_single_place_serves_one_request_after_the_other() -> None:
    load = Load(input_tokens=100, output_tokens=21, concurrency=4, requests_per_client=1)
    found = replay(4, load, 1, ALIKE)
    each_s = PROMPT_S + 20 * TOKEN_S
    assert found.token_s == pytest.approx(TOKEN_S)
    assert found.first_s == pytest.approx(PROMPT_S + each_s * (0 + 1 + 2 + 3) / 4)


def test_running_sequences_stall_for_prompts_unless_these_are_mixed() -> None:
    """Two clients, out of step by one prompt: the first stands still for the second's, or has a token from it."""
    load = Load(input_tokens=100, output_tokens=11, concurrency=2, requests_per_client=1)
    apart, mixed = (replay(2, load, 2, replace(ALIKE, mixes=mixes)) for mixes in (False, True))
    assert apart.token_s == pytest.approx((PROMPT_S + 10 * TOKEN_S + 10 * TOKEN_S) / 20)
    assert mixed.token_s == pytest.approx((PROMPT_S + 9 * TOKEN_S + 10 * TOKEN_S) / 20)


def test_prompts_that_fit_share_a_pass() -> None:
    load = Load(input_tokens=50, output_tokens=1, concurrency=4, requests_per_client=1)
    assert replay(4, load, 4, ALIKE).first_s == pytest.approx(PROMPT_S * (1 + 1 + 2 + 2) / 4)


def test_the_host_handles_one_request_after_the_other() -> None:
    """Each prompt is ready 2 s after the one before, and its pass is over long before the next is."""
    load = Load(input_tokens=100, output_tokens=1, concurrency=3, requests_per_client=1)
    found = replay(3, load, 3, replace(ALIKE, handling_s=lambda tokens: 0.02 * tokens))
    assert found.first_s == pytest.approx((2 + 4 + 6) / 3 + PROMPT_S)


@pytest.mark.parametrize(("interval", "ready_pass"), [(1, 5), (4, 8), (30, 30)])
def test_new_requests_wait_for_the_next_check(interval: int, ready_pass: int) -> None:
    """The second prompt is ready 4.5 decode passes after the first prompt's pass, in which nobody waits for it."""
    late_s = PROMPT_S + 4.5 * TOKEN_S
    load = Load(input_tokens=100, output_tokens=101, concurrency=2, requests_per_client=1)
    handled = iter((0.0, late_s))
    passes = replace(ALIKE, handling_s=lambda tokens: next(handled), poll_passes=interval)
    expected = (PROMPT_S + (PROMPT_S + ready_pass * TOKEN_S + PROMPT_S)) / 2
    assert replay(2, load, 2, passes).first_s == pytest.approx(expected)


@pytest.mark.parametrize(("most_passes", "filled_at", "waited"), [(0, 1e9, 5), (20, 1e9, 25), (20, 101, 5)])
def test_prompts_gather_while_sequences_run(most_passes: int, filled_at: float, waited: int) -> None:
    """The second prompt is ready after 4.5 decode passes, and then waits for others, unless it fills a pass."""
    handled = iter((0.0, PROMPT_S + 4.5 * TOKEN_S))
    load = Load(input_tokens=100, output_tokens=101, concurrency=2, requests_per_client=1)
    passes = replace(
        ALIKE,
        handling_s=lambda tokens: next(handled),
        batch_wait_passes=most_passes,
        batch_wait_tokens=filled_at,
    )
    expected = (PROMPT_S + (PROMPT_S + waited * TOKEN_S + PROMPT_S)) / 2
    assert replay(2, load, 2, passes).first_s == pytest.approx(expected)


def test_gathering_ends_with_the_last_running_sequence() -> None:
    """Nothing runs any more after 10 passes, and the prompt that waited is read at once."""
    handled = iter((0.0, PROMPT_S + 4.5 * TOKEN_S))
    load = Load(input_tokens=100, output_tokens=11, concurrency=2, requests_per_client=1)
    passes = replace(ALIKE, handling_s=lambda tokens: next(handled), batch_wait_passes=20, batch_wait_tokens=1e9)
    expected = (PROMPT_S + (PROMPT_S + 10 * TOKEN_S + PROMPT_S)) / 2
    assert replay(2, load, 2, passes).first_s == pytest.approx(expected)


def test_lines_are_interpolated_exactly() -> None:
    line = interpolated(lambda size: 3 + 2 * size)
    assert [line(size) for size in (1.0, 7.3, 4096.0)] == pytest.approx([5.0, 17.6, 8195.0])


@pytest.mark.parametrize("shortest", [0.0, 1.5])
def test_lengths_that_cannot_be_are_refused(shortest: float) -> None:
    with pytest.raises(ConfigurationError, match="shortest must be above 0"):
        Load(input_tokens=1, output_tokens=1, shortest=shortest)


def test_passes_that_mix_give_running_sequences_as_many_tokens_as_others() -> None:
    """Two clients, the second of which is let in late: one pass over its prompt gives the first two tokens, not one."""
    load = Load(input_tokens=100, output_tokens=9, concurrency=2, requests_per_client=1, shortest=1.0)
    one_by_one = replace(ALIKE, mixes=True, output_s=lambda sequences: 0.1, tokens_per_pass=100)
    plain, double = (replay(2, load, 2, replace(one_by_one, accepted=accepted)) for accepted in (1.0, 2.0))
    # The first client's eight further tokens: one (two) in the other's prompt pass, the rest in decode passes.
    assert plain.token_s == pytest.approx(((PROMPT_S + 7 * 0.1) / 8 + 0.1) / 2)
    assert double.token_s == pytest.approx(((PROMPT_S + 6 * 0.1) / 8 + 0.1) / 2)
