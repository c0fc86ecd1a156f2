"""What an operation is counted at, and the count itself."""

from __future__ import annotations

import threading
from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.core.sent_bytes import all_gather_sent, all_reduce_sent, broadcast_sent, shard_exchange_sent
from laconic.core.transport import DoneWork, Traffic

SIZES = st.integers(0, 10**12)
RANKS = st.integers(1, 100)


@given(SIZES, RANKS)
def test_formulas(nbytes: int, n: int) -> None:
    assert all_reduce_sent(nbytes, n) == ceil(Fraction(2 * (n - 1) * nbytes, n))
    assert all_gather_sent(nbytes, n) == (n - 1) * nbytes
    assert shard_exchange_sent(nbytes * n, n) == (n - 1) * nbytes


@given(SIZES)
def test_one_rank_sends_nothing(nbytes: int) -> None:
    assert all_reduce_sent(nbytes, 1) == 0
    assert all_gather_sent(nbytes, 1) == 0
    assert shard_exchange_sent(nbytes, 1) == 0
    assert broadcast_sent(nbytes, 1, 0) == 0


@given(RANKS)
def test_a_broadcast_reaches_every_other_rank_once(n: int) -> None:
    sent = [broadcast_sent(8, n, distance) for distance in range(n)]
    assert sum(sent) == 8 * (n - 1)
    # A binomial tree, played out: in round k every rank that has the value feeds the one 2**k places on.
    played = [0] * n
    reach = 1
    while reach < n:
        for distance in range(min(reach, n - reach)):
            played[distance] += 8
        reach *= 2
    assert sent == played


def test_traffic_is_kept_by_purpose_and_operation() -> None:
    traffic = Traffic()
    assert traffic.sent_bytes() == 0
    assert traffic.by_operation() == {}
    traffic.count("payload", "all_reduce(sum)", 10)
    traffic.count("payload", "all_reduce(sum)", 5)
    traffic.count("payload", "all_gather", 1)
    traffic.count("buffers", "broadcast(0)", 100)
    traffic.count("control", "all_reduce(max)", 1000)
    assert traffic.sent_bytes() == 1116
    assert traffic.sent_bytes("payload") == 16
    assert traffic.sent_bytes("buffers") == 100
    assert traffic.sent_bytes("control") == 1000
    assert traffic.by_operation() == {
        "buffers/broadcast(0)": 100,
        "control/all_reduce(max)": 1000,
        "payload/all_gather": 1,
        "payload/all_reduce(sum)": 15,
    }


def test_traffic_loses_nothing_between_threads() -> None:
    traffic = Traffic()
    start = threading.Barrier(4)

    def count() -> None:
        start.wait()
        for _ in range(5000):
            traffic.count("payload", "x", 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert traffic.sent_bytes() == 20_000


@pytest.mark.timeout(5)
def test_done_work_returns_at_once() -> None:
    work = DoneWork()
    work.wait()
    work.wait()
    assert work.done()
