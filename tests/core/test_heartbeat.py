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
