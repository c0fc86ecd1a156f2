"""Sums over real datagrams: right whatever happens to frames, or an error that names what is wrong."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from laconic.errors import CommunicationError, PeerLost
from laconic.runtime.datagrams import Datagram
from laconic.runtime.in_network import frames as wire
from tests.runtime.in_network.aggregation import TAG, Faulty, Job, integers, total

pytestmark = pytest.mark.timeout(60)
SIZES = (0, 1, 359, 360, 361, 100_003)
FUZZED = 100_000


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("num_slots", [1, 7, 256])
def test_every_rank_gets_the_sum(world_size: int, num_slots: int) -> None:
    sizes = SIZES if num_slots > 1 else SIZES[:-1]
    with Job(world_size, num_slots=num_slots) as job:
        for dtype in (torch.int32, torch.int64, torch.int16):
            for found in job.sum(lambda rank, dtype=dtype: [integers(rank, numel, dtype) for numel in sizes]):
                for numel, tensor in zip(sizes, found, strict=True):
                    assert torch.equal(tensor, total(world_size, numel, dtype))
        for traffic in job.traffic:
            frames = sum(wire.num_chunks(size * numel) for size in (4, 8, 2) for numel in sizes)
            assert traffic.by_operation()["control/frames"] >= 24 * frames


@pytest.mark.parametrize("num_slots", [5, 512])
def test_lost_doubled_and_late_frames_change_nothing(num_slots: int) -> None:
    numel = 50_000 if num_slots > 5 else 4_000
    with Job(3, num_slots=num_slots, sockets=lambda rank: Faulty(rank, lost=0.05, doubled=0.1, late=0.1)) as job:
        for _ in range(2):
            for (found,) in job.sum(lambda rank: [integers(rank, numel)]):
                assert torch.equal(found, total(3, numel))
        again = sum(traffic.by_operation().get("control/sent again", 0) for traffic in job.traffic)
        # Of 840 frames one in twenty was lost, and hardly any other was sent again.
        assert num_slots == 5 or 1464 * 10 < again < 1464 * 120


def test_floating_point_values_travel_as_integers_and_all_ranks_get_the_same_bits() -> None:
    def values(rank: int, dtype: torch.dtype) -> torch.Tensor:
        drawn = torch.randn(3001, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        largest = 2 if dtype == torch.float16 else 6
        return (drawn * torch.logspace(-6, largest, 3001, dtype=torch.float64)).to(dtype)

    relative = {torch.float64: 1e-15, torch.float32: 1e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}
    with Job(4) as job:
        for dtype, near in relative.items():
            inputs = [values(rank, dtype) for rank in range(4)]
            found = [sums[0] for sums in job.sum(lambda rank, inputs=inputs: [inputs[rank]])]
            exact = torch.stack([one.double() for one in inputs]).sum(0)
            assert all(torch.equal(one, found[0]) for one in found)
            assert found[0].dtype == dtype
            # Of a block of 1024 bytes the largest value counts, of which each rank's rounding is a share.
            per = 1024 // dtype.itemsize
            largest = torch.stack(
                [torch.stack(inputs).double().abs()[:, at : at + per].amax() for at in range(0, 3001, per)]
            )
            reach = largest.repeat_interleave(per)[:3001]
            kept = {8: 61, 4: 29, 2: 13}[dtype.itemsize]
            # In double precision what it is compared with is rounded too.
            allowed = near * torch.stack(inputs).double().abs().sum(0) + 4 * 2.0 ** (1 - kept) * reach
            assert bool(((found[0].double() - exact).abs() <= allowed).all())


def test_what_is_not_finite_arrives_as_nan_in_its_block_only() -> None:
    def values(rank: int) -> torch.Tensor:
        found = torch.ones(1024)
        if rank == 1:
            found[300] = torch.inf
        return found

    with Job(2) as job:
        for (found,) in job.sum(lambda rank: [values(rank)]):
            assert found[256:512].isnan().all()
            assert torch.equal(torch.cat((found[:256], found[512:])), torch.full((768,), 2.0))


def test_a_rank_that_waits_sends_questions_and_no_values_again() -> None:
    with Job(2) as job:
        early = job.workers[0].sum([integers(0, 20_000)], what="sum")
        time.sleep(0.8)
        late = job.workers[1].sum([integers(1, 20_000)], what="sum")
        for request in (early, late):
            assert torch.equal(request.sums[0], total(2, 20_000))
        sent = job.traffic[0].by_operation()
        assert "control/sent again" not in sent
        assert sent["control/frames"] < 24 * wire.num_chunks(80_000) + 26 * 20


def test_ranks_that_add_up_different_things_are_told() -> None:
    with Job(2) as job, pytest.raises(CommunicationError, match="ranks sent different things for chunk 0"):
        job.sum(lambda rank: [integers(rank, 100 + rank)])


def test_a_rank_that_has_left_is_named() -> None:
    with Job(2) as job:
        request = job.workers[0].sum([integers(0, 10)], what="sum of bucket 3")
        job.aggregator.leave(1)
        with pytest.raises(CommunicationError, match=r"sum of bucket 3 on rank 0 failed .* rank 1 has detached"):
            request.wait()


def test_a_dead_aggregator_is_named() -> None:
    with Job(2, timeout_s=0.3) as job:
        job.aggregator.close()
        with pytest.raises(CommunicationError, match=r"the aggregator at 127.0.0.1:\d+ did not answer in 0.3 s"):
            job.sum(lambda rank: [integers(rank, 10)])
    with Job(2) as job:
        request = job.workers[0].sum([integers(0, 10)], what="sum")
        job.failure = PeerLost("server 0 closed the connection")
        with pytest.raises(PeerLost, match="server 0 closed"):
            request.wait()


def test_a_hundred_thousand_frames_of_strangers_change_nothing() -> None:
    random = np.random.default_rng(0)
    with Job(2) as job:
        request = job.workers[0].sum([integers(0, 5000)], what="sum")
        while job.aggregator.waiting_for()[1] != [1]:
            time.sleep(0.01)  # until rank 0 has shown where it is
        good = wire.write(wire.PART, np.arange(44), np.zeros((44, 1440), np.uint8), code=wire.SUM_I32, rank=1, tag=TAG)
        for _ in range(FUZZED // 44 + 1):
            rows = random.integers(0, 256, good.shape, dtype=np.uint8)
            rows[::2] = good[::2]
            # Half of them are right but for one byte of the header.
            rows[np.arange(0, 44, 2), random.integers(0, 24, 22)] ^= random.integers(1, 256, 22, dtype=np.uint8)
            # From here, frames of any rank are those of a stranger once the rank has sent one itself.
            rows[:, 4:6] = 0
            length = int(random.integers(1, 1465)) if random.random() < 0.5 else 1464
            cut = rows[:, :length].reshape(-1)
            job.aggregator.take(
                Datagram(cut, int(random.integers(1, 1465)) if length < 1464 else 1464, ("10.9.9.9", 9))
            )
        other = job.workers[1].sum([integers(1, 5000)], what="sum")
        for one in (request, other):
            assert torch.equal(one.sums[0], total(2, 5000))
