"""Counters in the job's store, asked by threads that can be given up."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import cast

import pytest
import torch.distributed as dist

from laconic.core import tallies
from laconic.core.heartbeat import Heartbeat
from laconic.core.in_process import InProcessCluster
from laconic.errors import CommunicationError, PeerLost


class _Heartbeat:
    """One that knows of a failure, or of none."""

    def __init__(self, failure: str = "") -> None:
        self._failure = failure

    def check(self, operation: str) -> None:
        if self._failure:
            raise PeerLost(f"{operation}: {self._failure}")

    def explain(self, operation: str, cause: str, *, timed_out: bool = False) -> CommunicationError:
        return CommunicationError(f"{operation} {cause}")


def _tallies(
    monkeypatch: pytest.MonkeyPatch, store: object, *, failure: str = "", timeout_s: float = 5.0
) -> tallies.Tallies:
    monkeypatch.setattr(tallies, "job_store", lambda: store)
    monkeypatch.setattr(tallies.dist, "PrefixStore", lambda prefix, inner: inner)
    return tallies.Tallies("group", cast(Heartbeat, _Heartbeat(failure)), timeout_s)


def test_counters_add_up_and_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    one, other = (_tallies(monkeypatch, store) for _ in range(2))
    assert one.add("unused/0/3", 1) == 1
    assert other.add("unused/0/3", 1) == 2
    assert one.add("unused/0/3", 0) == 2
    one.drop("unused/0/3")
    other.drop("unused/0/3")
    assert one.add("unused/0/3", 0) == 0


class _SilentStore:
    """The store of a host that has frozen."""

    def __init__(self) -> None:
        self.thawed = threading.Event()

    def add(self, name: str, amount: int) -> int:
        self.thawed.wait(20)
        return 0


def test_a_store_that_never_answers_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tallies, "_SLICE_S", 0.02)
    store = _SilentStore()
    try:
        with pytest.raises(CommunicationError, match=r'counter "a" got no answer in 0\.1 s'):
            _tallies(monkeypatch, store, timeout_s=0.1).add("a", 1)
        with pytest.raises(PeerLost, match="rank 2 raised"):
            _tallies(monkeypatch, store, failure="rank 2 raised").add("a", 1)
    finally:
        store.thawed.set()


def test_a_broken_connection_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def add(self, name: str, amount: int) -> int:
            raise RuntimeError("connection reset")

    with pytest.raises(CommunicationError, match='counter "a" connection reset'):
        _tallies(monkeypatch, Broken()).add("a", 1)


def test_ranks_as_threads_count_together() -> None:
    cluster = InProcessCluster(4)
    assert sorted(cluster.run(lambda transport: transport.tally("here", 1))) == [1, 2, 3, 4]
    transport = cluster.transport(0)
    assert transport.tally("here", 0) == 4
    transport.drop_tally("here")
    assert transport.tally("here", 0) == 0
