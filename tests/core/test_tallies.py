"""Counters in the job's store, asked by threads that can be given up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import cast

import pytest
import torch.distributed as dist

from laconic.core import job_store, tallies
from laconic.core.heartbeat import Heartbeat
from laconic.core.in_process import InProcessCluster
from laconic.core.job_store import JobStore
from laconic.core.tallies import Tallies
from laconic.errors import PeerLost


@pytest.fixture
def heartbeat(monkeypatch: pytest.MonkeyPatch) -> Iterator[Heartbeat]:
    """The only rank that beats, of two."""
    store = dist.HashStore()
    monkeypatch.setattr(job_store, "_default_store", lambda: SimpleNamespace(clone=lambda: store))
    made = Heartbeat(JobStore(timeout_s=5.0), "test", 0, range(2), timeout_s=1.0)
    yield made
    made.stop()


def test_counters_add_up_and_are_dropped(heartbeat: Heartbeat) -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    one, other = (Tallies(store, heartbeat) for _ in range(2))
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


def _tallies(monkeypatch: pytest.MonkeyPatch, store: object, heartbeat: Heartbeat) -> Tallies:
    monkeypatch.setattr(tallies.dist, "PrefixStore", lambda prefix, inner: inner)
    return Tallies(cast(dist.Store, store), heartbeat)


def test_a_store_that_never_answers_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch, heartbeat: Heartbeat) -> None:
    store = _SilentStore()
    counters = _tallies(monkeypatch, store, heartbeat)
    try:
        with pytest.raises(PeerLost, match=r'counter "a" on rank 0 cannot finish: rank 1 did not attach'):
            counters.add("a", 1)
        with pytest.raises(PeerLost, match="rank 1 did not attach"):
            counters.add("a", 1)
    finally:
        store.thawed.set()


def test_a_broken_connection_is_explained(monkeypatch: pytest.MonkeyPatch, heartbeat: Heartbeat) -> None:
    class Broken:
        def add(self, name: str, amount: int) -> int:
            raise RuntimeError("connection reset")

    with pytest.raises(PeerLost, match="rank 1 did not attach") as caught:
        _tallies(monkeypatch, Broken(), heartbeat).add("a", 1)
    assert "connection reset" in str(caught.value.__cause__)


def test_ranks_as_threads_count_together() -> None:
    cluster = InProcessCluster(4)
    assert sorted(cluster.run(lambda transport: transport.tally("here", 1))) == [1, 2, 3, 4]
    transport = cluster.transport(0)
    assert transport.tally("here", 0) == 4
    transport.drop_tally("here")
    assert transport.tally("here", 0) == 0
