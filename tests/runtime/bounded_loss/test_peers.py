"""Exchanges over real datagrams, of which some are lost, doubled or late: identical on all ranks, with loss bounded."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from laconic.architecture.datagrams.loss_bound import LossBound
from laconic.core.transport import Traffic
from laconic.errors import CommunicationError
from laconic.runtime.bounded_loss import frames as wire
from laconic.runtime.bounded_loss.peers import Peers, Request
from laconic.runtime.datagrams import Datagram, Datagrams
from tests.core.sockets import eventually, nothing_left
from tests.runtime.in_network.aggregation import HOST, TAG, Faulty

pytestmark = pytest.mark.timeout(60)
LIMIT_S = 20.0


class Job:
    """n ranks in threads of this process."""

    def __init__(
        self,
        world_size: int,
        *,
        tolerate: float = 0.05,
        sockets: Callable[[int], Datagrams] = lambda rank: Datagrams(HOST),
    ) -> None:
        made = [sockets(rank) for rank in range(world_size)]
        self.addresses = [one.address for one in made]
        self.traffic = [Traffic() for _ in made]
        bound = LossBound(tolerate=tolerate, percentile=0.95)
        self.peers = [
            Peers(one, self.addresses, rank=rank, tag=TAG, bound=bound, traffic=self.traffic[rank])
            for rank, one in enumerate(made)
        ]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            for one in self.peers:
                stack.callback(one.close)

    def begin(self, rank: int, values: torch.Tensor) -> Request:
        """Rows of one rank: n times R times W values."""
        return self.peers[rank].reduce(values.view(torch.uint8).numpy(), wire.CODES[values.dtype], what="bucket 3")

    def exchange(self, number: int, num_rows: int, width: int = 8) -> tuple[list[torch.Tensor], torch.Tensor, float]:
        """What every rank gets, the exact sum, and the share of rows that was lost."""
        inputs = [values_of(rank, number, len(self.peers), num_rows, width) for rank in range(len(self.peers))]
        requests = [self.begin(rank, one) for rank, one in enumerate(inputs)]
        found = [result(request) for request in requests]
        return found, torch.stack(inputs).sum(0), sum(one.lost_ratio for one in requests) / len(requests)


def values_of(rank: int, number: int, world_size: int, num_rows: int, width: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(-1000, 1000, (world_size, num_rows, width), generator=generator).float()


def result(request: Request) -> torch.Tensor:
    assert request.over.wait(LIMIT_S), "too late"
    if request.error is not None:
        raise request.error
    assert request.means is not None
    return torch.from_numpy(request.means).view(torch.float32)


@pytest.mark.parametrize("world_size", [2, 4])
def test_without_loss_every_rank_gets_the_sum(world_size: int) -> None:
    with nothing_left(), Job(world_size) as job:
        for number, num_rows in enumerate((1, 44, 45, 500)):
            found, total, lost = job.exchange(number, num_rows)
            assert all(torch.equal(one, total) for one in found), "whole numbers are added exactly"
            assert lost == 0
        payload = 2 * (world_size - 1) * (1 + 44 + 45 + 500) * 32
        assert all(traffic.sent_bytes("payload") == payload for traffic in job.traffic)


def test_with_loss_doubles_and_disorder_replicas_are_identical_and_loss_is_bounded() -> None:
    shares = []
    with Job(3, sockets=lambda rank: Faulty(rank, lost=0.03, doubled=0.05, late=0.02)) as job:
        for number in range(8):
            found, total, lost = job.exchange(number, 200)
            assert all(torch.equal(one, found[0]) for one in found)
            shares.append(lost)
            wrong = (found[0] != total).any(-1).float().mean().item()
            # Of each row a rank sends one is lost in 33, and three ranks can spoil it; its owner's own never is.
            assert lost - 1e-6 <= wrong <= 3 * lost + 1e-6
        assert 0 < sum(shares) / len(shares) <= 0.05
        assert all(0 < peer.lost_ratio <= 0.05 for peer in job.peers)
        again = [traffic.by_operation()["control/sent again"] for traffic in job.traffic]
        assert min(again) > 0, "means that were lost are sent again"


def test_more_than_is_tolerated_is_fetched() -> None:
    with Job(3, tolerate=0.001, sockets=lambda rank: Faulty(rank, lost=0.2, doubled=0.0, late=0.0)) as job:
        for number in range(3):
            found, total, lost = job.exchange(number, 100)
            assert all(torch.equal(one, found[0]) for one in found)
            assert lost <= 0.001 * (number + 1)
            assert lost > 0 or torch.equal(found[0], total)


def test_nobody_waits_for_a_rank_that_is_late_and_it_gets_the_same() -> None:
    """Its own thread forms the sums of its rows without it."""
    with Job(4) as job:
        for number in range(32):  # of which no time limit follows before
            _, _, lost = job.exchange(number, 20)
            assert lost == 0
        inputs = [values_of(rank, 32, 4, 20) for rank in range(4)]
        punctual = [job.begin(rank, inputs[rank]) for rank in range(3)]
        found = [result(request) for request in punctual]
        expected = 4 * torch.stack(inputs[:3]).mean(0)
        for one in (*found, result(job.begin(3, inputs[3]))):
            torch.testing.assert_close(one, expected)
            assert torch.equal(one, found[0])
        assert [request.lost_ratio for request in punctual] == [0.25] * 3
        # Others go on only as far as they may.
        ahead = []
        for number in range(33, 200):
            ahead += [[job.begin(rank, values_of(rank, number, 4, 20)) for rank in range(3)]]
            if not all(request.over.wait(0.5) for request in ahead[-1]):
                break
        assert 1 <= len(ahead) <= 33 * 0.05 * 4 + 2, "a quarter each time, of a twentieth saved up in each before"
        for number, requests in enumerate(ahead, start=33):
            late = result(job.begin(3, values_of(3, number, 4, 20)))
            assert all(torch.equal(result(request), late) for request in requests)


def test_frames_of_strangers_and_of_exchanges_that_are_over_change_nothing() -> None:
    random = np.random.default_rng(0)
    with Job(2) as job:
        job.exchange(0, 50)
        fields = {"rows": 50, "code": 1, "base": 0}
        wrong = np.full((44, 32), 0x40, np.uint8)
        for exchange, rank, tag, sender in (
            (1, 1, TAG ^ 1, job.addresses[1]),  # another job
            (1, 1, TAG, (HOST, 9)),  # another address
            (1, 0, TAG, job.addresses[1]),  # another rank's name
            (0, 1, TAG, job.addresses[1]),  # over
            (5000, 1, TAG, job.addresses[1]),  # not yet
        ):
            rows = wire.write(wire.PART, np.arange(44), wrong, exchange=exchange, rank=rank, tag=tag, **fields)
            job.peers[0].take(Datagram(rows.reshape(-1), 64, sender))
        for _ in range(200):
            noise = random.integers(0, 256, 44 * 64, dtype=np.uint8)
            job.peers[0].take(Datagram(noise, int(random.integers(1, 2000)), job.addresses[1]))
        found, total, lost = job.exchange(1, 50)
        assert all(torch.equal(one, total) for one in found)
        assert lost == 0


def test_memory_for_exchanges_that_have_not_begun_is_bounded() -> None:
    with Job(2) as job:
        for number in range(3):
            rows = wire.write(
                wire.PART,
                [0],
                np.zeros((1, 1440), np.uint8),
                exchange=number,
                rows=2**20,
                code=1,
                rank=1,
                base=0,
                tag=TAG,
            )
            job.peers[0].take(Datagram(rows.reshape(-1), 1472, job.addresses[1]))
        assert len(job.peers[0]._states) == 0


def test_ranks_that_exchange_different_things_are_told() -> None:
    with Job(2) as job:
        requests = [job.begin(rank, values_of(rank, 0, 2, 10 + rank)) for rank in range(2)]
        assert eventually(lambda: any(request.error is not None for request in requests))
        error = next(request.error for request in requests if request.error is not None)
        assert "ranks exchange different things: in exchange 0" in str(error)


def test_closing_ends_what_is_open() -> None:
    with nothing_left():
        with Job(2) as job:
            request = job.begin(0, values_of(0, 0, 2, 10))
            time.sleep(0.05)
            assert job.peers[0].waits_for(request) == "rows from rank 0, 1"
        with pytest.raises(CommunicationError, match="detached here"):
            result(request)
        with pytest.raises(CommunicationError, match="detached here"):
            job.begin(0, values_of(0, 0, 2, 10))
