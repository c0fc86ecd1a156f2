"""One exchange by itself, how long it is waited for, and how much may be lost: laws, without sockets or clocks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.errors import CommunicationError
from laconic.runtime.bounded_loss.deadline import Deadline
from laconic.runtime.bounded_loss.frames import CODES
from laconic.runtime.bounded_loss.ledger import LossLedger
from laconic.runtime.bounded_loss.pace import Pace
from laconic.runtime.bounded_loss.partial_sum import PartialSum
from laconic.runtime.bounded_loss.retries import Retries, RoundTrip


def rows_of(rank: int, num_rows: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    drawn = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return drawn.to(dtype)


def as_bytes(rows: torch.Tensor) -> np.ndarray:
    return rows.contiguous().view(torch.uint8).numpy()


def opened(world_size: int, num_rows: int, width: int, dtype: torch.dtype = torch.float32) -> PartialSum:
    shape = (num_rows, width * dtype.itemsize, CODES[dtype])
    return PartialSum(0, shape, rank=0, trips=[RoundTrip()] * world_size, limit_s=None, now_s=0.0)


@settings(max_examples=25)
@given(st.data(), st.integers(2, 5), st.integers(1, 9), st.sampled_from(list(CODES)))
def test_a_sum_is_n_times_the_mean_of_what_arrived(
    data: st.DataObject, world_size: int, num_rows: int, dtype: torch.dtype
) -> None:
    """In any order, with any rows missing and any twice; own rows are always there once the rank has begun."""
    width, state = 3, opened(world_size, num_rows, 3, dtype)
    inputs = [rows_of(rank, num_rows, width, dtype) for rank in range(world_size)]
    state.begin(np.stack([as_bytes(inputs[0])] * world_size), 0.0)
    places = st.tuples(st.integers(1, world_size - 1), st.integers(0, num_rows - 1))
    arrivals = data.draw(st.lists(places, max_size=3 * world_size * num_rows))
    for rank, row in arrivals:
        twice = np.array([row, row])
        state.add(rank, twice, as_bytes(inputs[rank])[twice], 1.0)
    there = {(0, row) for row in range(num_rows)} | set(arrivals)
    assert state.missing == world_size * num_rows - len(there)
    assert state.can_close
    state.close(1.0)
    assert state.lost == state.missing
    found = torch.from_numpy(state.means_of(np.arange(num_rows))).view(dtype).double()
    for row in range(num_rows):
        present = torch.stack([inputs[rank][row].double() for rank in range(world_size) if (rank, row) in there])
        near = {8: 1e-12, 4: 1e-5, 2: 2e-2}[dtype.itemsize] * world_size
        torch.testing.assert_close(found[row], world_size * present.mean(0), rtol=near, atol=near)


def test_an_owner_adds_up_before_its_own_loop_comes_but_needs_somebody() -> None:
    state = opened(3, 2, 4)
    assert not state.can_close
    for rank in (1, 2):
        state.add(rank, np.arange(2), as_bytes(rows_of(rank, 2, 4)), 0.0)
    assert state.can_close
    assert not state.complete
    state.close(1.0)
    expected = 3 * torch.stack([rows_of(1, 2, 4), rows_of(2, 2, 4)]).mean(0)
    torch.testing.assert_close(torch.from_numpy(state.means_of(np.arange(2))).view(torch.float32), expected)
    state.begin(np.zeros((3, 2, 16), np.uint8), 1.0)
    state.add(1, np.arange(2), as_bytes(rows_of(7, 2, 4)), 2.0)
    torch.testing.assert_close(torch.from_numpy(state.means_of(np.arange(2))).view(torch.float32), expected)
    assert state.lost == 2


def test_means_come_once_and_are_handed_out_when_all_are_there() -> None:
    state = opened(2, 3, 4)
    state.begin(np.zeros((2, 3, 16), np.uint8), 0.0)
    state.add(1, np.arange(3), np.zeros((3, 16), np.uint8), 0.0)
    state.close(1.0)
    assert state.missing_means(1).tolist() == [0, 1, 2]
    values = as_bytes(rows_of(1, 3, 4))
    state.take(1, np.array([2]), values[[2]], 0.0)
    state.take(1, np.array([2, 0]), np.zeros((2, 16), np.uint8), 0.0)
    assert state.missing_means(1).tolist() == [1]
    state.take(1, np.array([1]), values[[1]], 0.0)
    assert state.all_means
    assert np.array_equal(state.finish()[1, 1:], values[1:])
    assert state.means_of(np.array([0])).shape == (1, 16), "kept for ranks that ask"


def test_different_things_are_named() -> None:
    with pytest.raises(CommunicationError, match="in exchange 0 rank 2 has 3 rows of 8 bytes"):
        opened(3, 2, 4).check_shape((3, 8, 1), 2)


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 1)), max_size=200), st.floats(0.01, 0.5))
def test_loss_is_bounded_over_any_run_of_exchanges(exchanges: list[tuple[int, float]], tolerate: float) -> None:
    ledger, taken = LossLedger(tolerate), []
    for expected, share in exchanges:
        lost = int(share * expected)
        if not ledger.allows(lost, expected):
            lost = 0
        ledger.settle(lost, expected)
        taken.append((lost, expected))
    largest = max((expected for _, expected in taken), default=0)
    for first in range(len(taken)):
        lost = expected = 0
        for one, of in taken[first:]:
            lost, expected = lost + one, expected + of
            assert lost <= tolerate * (expected + 32 * largest) + 1e-6
    assert ledger.lost_ratio <= tolerate + 1e-9


def test_a_rank_that_is_late_now_and_then_may_be_left_out_and_one_that_always_is_may_not() -> None:
    ledger, left_out = LossLedger(0.05), []
    for number in range(200):
        lost = 25 if number >= 100 or number % 20 == 19 else 0  # one of four ranks
        allowed = ledger.allows(lost, 100)
        ledger.settle(lost if allowed else 0, 100)
        left_out.append(allowed and lost > 0)
    assert sum(left_out[:100]) == 5
    assert sum(left_out[150:]) == 10, "one exchange of five"


def test_the_time_limit_is_a_percentile_of_the_same_size() -> None:
    deadline = Deadline(0.9)
    for number in range(31):
        deadline.note(1000, 0.1)
        deadline.note(7, 5.0)
        assert deadline.limit_s(1000) is None, number
    deadline.note(1000, 0.1)
    assert deadline.limit_s(1000) == pytest.approx(1.25 * 0.1 + 0.02)
    assert deadline.limit_s(7) is None
    for number in range(64):
        deadline.note(1000, number / 64)
    assert deadline.limit_s(1000) == pytest.approx(1.25 * np.quantile(np.arange(64) / 64, 0.9) + 0.02)


def test_a_network_that_becomes_slower_gets_more_time() -> None:
    deadline, takes_s = Deadline(0.95), 0.4
    for _ in range(32):
        deadline.note(1, 0.05)
    for _ in range(300):
        limit_s = deadline.limit_s(1)
        assert limit_s is not None
        deadline.note(1, min(takes_s, limit_s))
    assert limit_s > takes_s


def test_questions_are_asked_less_and_less_often_and_round_trips_are_learnt() -> None:
    trip = RoundTrip()
    retries, asked, now_s = Retries(trip, 0.0), [], 0.0
    for _ in range(12):
        now_s = retries.due_s()
        asked.append(now_s)
        retries.ask(now_s)
    pauses = np.diff(asked)
    assert (np.diff(pauses) >= -1e-9).all()
    assert pauses[-1] == pytest.approx(0.5)
    retries.hear(now_s + 9)
    assert trip.seconds == 0.01, "nobody knows which question was answered"
    for _ in range(100):
        retries.ask(now_s := now_s + 10)
        retries.hear(now_s + 0.1)
    assert trip.seconds == pytest.approx(0.1, rel=0.01)
    trip.note_pause(0.2)
    assert retries.due_s() == pytest.approx(now_s + 0.1 + 2 * 0.2 + 0.005, rel=1e-3), "rows may be on their way"
    assert retries.due_s(lost=True) == pytest.approx(now_s + 0.1 + 0.005), "rows are not"


@pytest.mark.parametrize("num_frames", [60, 500, 6000])
def test_a_rank_sends_at_the_rate_that_gets_through(num_frames: int) -> None:
    """A network that carries 1 MB/s and drops the rest."""
    rates, lost = paced(lambda rate: max(0.0, 1 - 1e6 / rate), num_frames)
    assert 0.85e6 <= min(rates) < max(rates) <= 1.2e6
    assert np.mean(lost) < 0.05
    rates, _ = paced(lambda rate: max(0.0, 1 - 1e6 / rate), num_frames, then=lambda rate: 0.0)
    assert rates[-1] == pytest.approx(10e6), "once nothing is lost any more, the own link is the limit again"


@pytest.mark.parametrize("num_frames", [60, 500, 6000])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.04, 0.1])
def test_what_is_lost_at_random_slows_nobody_down(share: float, num_frames: int) -> None:
    """Whether it is below what is harmless, or so much that slowing down was tried and did not help."""
    rates, _ = paced(lambda rate: share, num_frames)
    assert np.mean(rates) > 8.5e6


def test_heavy_loss_is_not_taken_for_random_before_slowing_down_was_tried() -> None:
    """Half of what is sent at 10 MB/s is lost, and little at 4."""
    rates, _ = paced(lambda rate: min(0.5, max(0.0, (rate - 4e6) / 12e6)), 2000)
    assert max(rates) < 5.5e6


def paced(
    lost: Callable[[float], float], num_frames: int, then: Callable[[float], float] | None = None
) -> tuple[list[float], list[float]]:
    """The rates and losses at the end, if the network drops each frame with this probability at this rate.

    The sender's own link takes 10 MB/s.
    """
    pace, now_s, found, drawn = Pace(), 0.0, list[tuple[float, float]](), np.random.default_rng(num_frames)
    count = 300 * max(1, 2000 // num_frames)
    for exchange in range(count):
        began_s = now_s
        for _ in range(10):
            now_s = max(now_s + num_frames / 10 * 1000 / 10e6, pace.due_s())
            pace.sent(num_frames * 100, now_s)
        rate = num_frames * 1000 / (now_s - began_s)
        share = (then if then is not None and exchange >= count / 2 else lost)(rate)
        pace.update(int(drawn.binomial(num_frames, share)), num_frames)
        pace.rest()
        found.append((rate, share))
    last = found[-count // 6 :]
    return [rate for rate, _ in last], [share for _, share in last]
