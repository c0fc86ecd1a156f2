"""Who is to blame, with a store of one process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from laconic.core import job_store
from laconic.core.heartbeat import Heartbeat
from laconic.core.job_store import JobStore
from laconic.errors import CommunicationError, PeerLost
from tests.processes import eventually

ADVICE = "Every rank must call it."


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Heartbeat]]:
    store = dist.HashStore()
    monkeypatch.setattr(job_store, "_default_store", lambda: SimpleNamespace(clone=lambda: store))
    made = [Heartbeat(JobStore(timeout_s=5.0), "test", rank, range(2), timeout_s=5.0) for rank in range(2)]
    yield made
    for one in made:
        one.stop()


def both(ranks: list[Heartbeat], texts: list[str], exchange: int = 0) -> list[list[str]]:
    def one(rank: int) -> list[str]:
        return ranks[rank].gather_texts(texts[rank], what="a test", exchange=exchange, advice=ADVICE)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def test_texts_of_all_ranks_arrive_in_order_again_and_again(ranks: list[Heartbeat]) -> None:
    for number in range(5):
        texts = [f"{number} from {rank}" for rank in range(2)]
        assert both(ranks, texts) == [texts, texts]


def test_a_rank_that_is_in_a_later_exchange_will_not_come(ranks: list[Heartbeat]) -> None:
    ranks[1].status, ranks[1].exchange = "step 7: bucket 0", 4
    began_s = time.monotonic()
    with pytest.raises(CommunicationError, match='rank 0 is in a test, while rank 1 is in "step 7: bucket 0"'):
        ranks[0].gather_texts("", what="a test", exchange=3, advice=ADVICE)
    assert time.monotonic() - began_s < 4
    assert eventually(lambda: ranks[1]._failure is not None, 5)
    with pytest.raises(PeerLost, match="rank 0 is in a test, while rank 1"):
        ranks[1].check("bucket 0")


def test_a_rank_that_detaches_will_not_come(ranks: list[Heartbeat]) -> None:
    ranks[1].stop()
    with pytest.raises(CommunicationError, match=r"while rank 1 has detached. Every rank must call it."):
        ranks[0].gather_texts("", what="a test", exchange=3, advice=ADVICE)


def test_a_rank_that_is_late_is_waited_for_and_then_named(ranks: list[Heartbeat]) -> None:
    ranks[1].status, ranks[1].exchange = "step 6: computing", 3
    ranks[0]._timeout_s = 1.0
    with pytest.raises(CommunicationError, match=r'did not finish in 1 s; rank 1 says "step 6: computing"'):
        ranks[0].gather_texts("", what="a test", exchange=3, advice=ADVICE)


class FragileStore(dist.Store):
    """A store that can end."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dist.HashStore()
        self.ended = False

    def _answering(self) -> dist.HashStore:
        if self.ended:
            raise RuntimeError("the host has ended")
        return self.inner

    def set(self, key: str, value: str) -> None:
        self._answering().set(key, value)

    def get(self, key: str) -> bytes:
        return self._answering().get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self._answering().get(key) for key in keys]

    def add(self, key: str, value: int) -> int:
        return self._answering().add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._answering().check(keys)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return self._answering().compare_set(key, expected.decode(), desired.decode())


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_a_group_without_the_host_of_the_store(leaves: bool, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on if rank 0 has left in order, and does not forget who failed."""
    store = FragileStore()
    monkeypatch.setattr(job_store, "_default_store", lambda: SimpleNamespace(clone=lambda: store))
    one, other = (Heartbeat(JobStore(timeout_s=5.0), "test", rank, [1, 3], timeout_s=5.0) for rank in range(2))
    host = Heartbeat(JobStore(timeout_s=5.0), "host", 0, [0], timeout_s=5.0)
    if leaves:
        host.stop()
        assert eventually(lambda: one._host_leaves, 5)
    if fails:
        other.fail(1, "raised ValueError: no more data")
        assert eventually(lambda: one._failure is not None, 5)
    store.ended = True
    assert eventually(lambda: one._store_gone and other._store_gone, 5)
    began_s = time.monotonic()
    if fails:
        with pytest.raises(PeerLost, match="rank 1 raised ValueError: no more data"):
            one.check("a sum")
        assert "rank 1 raised ValueError: no more data" in str(one.explain("a sum", "broke"))
    elif leaves:
        one.check("a sum")
        assert one.silent_rank("a sum") is None
        assert "a sum failed on rank 0: broke; the job's rank 0 has ended" in str(one.explain("a sum", "broke"))
        with pytest.raises(PeerLost, match="the job's store, is gone"):
            one.gather_texts("", what="a test", exchange=0, advice=ADVICE)
    else:
        with pytest.raises(PeerLost, match="the job's store, is gone"):
            one.check("a sum")
    for beat in (one, other, host):
        beat.stop()
    assert time.monotonic() - began_s < 4


def test_a_fault_of_the_device_is_not_blamed_on_the_store(ranks: list[Heartbeat]) -> None:
    class Broken:
        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    ranks[1].watch("all_reduce(sum) of bucket 0", Broken())  # pyrefly: ignore[bad-argument-type]
    assert eventually(lambda: ranks[1].lost is not None and ranks[0]._failure is not None, 5)
    assert "failed on the device: CUDA error: an illegal memory access" in str(ranks[1].lost)
    with pytest.raises(PeerLost, match="rank 1 failed on the device: CUDA error"):
        ranks[0].check("bucket 0")
    with pytest.raises(PeerLost, match="failed on the device"):
        ranks[1].check("bucket 0")
