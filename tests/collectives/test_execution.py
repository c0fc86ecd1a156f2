"""Collectives carried out: the plain sum, the same bits everywhere, the bytes predicted."""

from __future__ import annotations

import pytest
import torch

from laconic.collectives import ALGORITHMS
from laconic.collectives.execution import WholeExchange, run, step_by_step, unrolled
from laconic.collectives.members import Members
from laconic.collectives.price import price
from laconic.collectives.ring import ring
from laconic.core.exchange import Exchange, one_round
from laconic.core.hosts import hosts_alone
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.sent_bytes import all_gather_sent, shard_exchange_sent
from laconic.core.transport import AllWork, DoneWork
from tests.collectives.layouts import collective, every_algorithm, hosts_of_size

pytestmark = pytest.mark.timeout(60)
SIZES = (0, 1, 7, 61, 4099)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8)


def contribution(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, whose sums are exact in every dtype and every order."""
    return torch.randint(0, 20, (numel,), generator=torch.Generator().manual_seed(rank)).to(dtype)


@every_algorithm
@pytest.mark.parametrize("world_size", range(1, 9))
def test_equals_the_plain_sum_and_costs_what_is_predicted(algorithm: str, world_size: int) -> None:
    made = collective(algorithm, world_size)
    cases = [(numel, torch.float32) for numel in SIZES] + [(61, dtype) for dtype in DTYPES]

    def rank(transport: InProcessTransport) -> list[tuple[torch.Tensor, int, int]]:
        found = []
        for numel, dtype in cases:
            before = transport.traffic.sent_bytes("payload")
            tensor = contribution(transport.rank, numel, dtype)
            num_waits = 0
            for work in run(made, transport, (tensor,), what="a test"):
                work.wait()
                num_waits += 1
            found.append((tensor, transport.traffic.sent_bytes("payload") - before, num_waits))
        return found

    results = InProcessCluster(world_size).run(rank)
    for number, (numel, dtype) in enumerate(cases):
        expected = torch.stack([contribution(other, numel, dtype) for other in range(world_size)]).sum(0).to(dtype)
        for place, result in enumerate(results):
            tensor, sent, num_waits = result[number]
            assert torch.equal(tensor, expected)
            assert sent == price(made, numel * dtype.itemsize).sent_bytes[place]
            assert num_waits == made.num_steps


@every_algorithm
def test_replicas_are_identical_bit_for_bit_and_from_run_to_run(algorithm: str) -> None:
    """With values whose sum depends on the order."""
    for world_size in (3, 5, 8):
        made = collective(algorithm, world_size)

        def rank(transport: InProcessTransport, made=made) -> torch.Tensor:
            generator = torch.Generator().manual_seed(transport.rank)
            tensor = torch.randn(1013, generator=generator) * 10.0 ** torch.randint(-6, 7, (1013,), generator=generator)
            WholeExchange(run(made, transport, (tensor,), what="a test")).wait()
            return tensor

        first, again = (InProcessCluster(world_size).run(rank) for _ in range(2))
        for tensor in (*first[1:], *again):
            assert torch.equal(tensor, first[0])
        exact = sum(_drawn(other) for other in range(world_size))
        torch.testing.assert_close(first[0].double(), exact, rtol=1e-4, atol=1.0)


def _drawn(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(1013, generator=generator)
    return (values * 10.0 ** torch.randint(-6, 7, (1013,), generator=generator)).double()


def test_several_tensors_travel_together() -> None:
    made = ring(3)

    def rank(transport: InProcessTransport) -> list[torch.Tensor]:
        tensors = [torch.full((size,), transport.rank + 1.0, dtype=dtype) for size, dtype in MIXED]
        works = list(map(_waited, run(made, transport, tensors, what="a test")))
        assert len(works) == made.num_steps
        return tensors

    for tensors in InProcessCluster(3).run(rank):
        for tensor, (size, dtype) in zip(tensors, MIXED, strict=True):
            assert torch.equal(tensor, torch.full((size,), 6.0, dtype=dtype))


MIXED = ((5, torch.float32), (0, torch.float32), (17, torch.float16))


def _waited(work: object) -> object:
    work.wait()  # type: ignore[attr-defined]
    return work


def test_exchanges_waited_for_in_another_order_do_not_mix() -> None:
    """Steps of two sums are issued by turns, and the waits of each turn are swapped."""

    def rank(transport: InProcessTransport) -> tuple[float, float]:
        first, second = torch.full((10,), 1.0), torch.full((10,), 100.0)
        one = run(ring(4), transport, (first,), what="one")
        two = run(ring(4), transport, (second,), what="two")
        for left, right in zip(one, two, strict=True):
            right.wait()
            left.wait()
        return first.mean().item(), second.mean().item()

    assert InProcessCluster(4).run(rank) == [(4.0, 400.0)] * 4


def test_whole_exchanges_and_steps_inside_other_work() -> None:
    def rank(transport: InProcessTransport) -> list[float]:
        tensors = [torch.ones(8) for _ in range(4)]

        def whole(tensor: torch.Tensor) -> WholeExchange:
            return WholeExchange(run(ring(3), transport, (tensor,), what="a test"))

        work = whole(tensors[0])
        assert not work.done()
        work.wait()
        assert work.done()
        assert len(list(work.steps())) == 1, "nothing is left but to say so"
        both = AllWork([whole(tensors[1]), whole(tensors[2]), DoneWork()])
        steps = [step.wait() for step in step_by_step(both)]
        assert len(steps) == 4, "both proceed together"

        def mixed() -> Exchange:
            yield whole(tensors[3])
            yield DoneWork()

        assert len([step.wait() for step in unrolled(mixed(), 7)]) == 7, "five and two idle ones"
        assert len(list(step_by_step(DoneWork()))) == len(list(one_round(DoneWork())))
        return [tensor.mean().item() for tensor in tensors]

    assert InProcessCluster(3).run(rank) == [[3.0] * 4] * 3


@pytest.mark.parametrize("ranks", [(0, 2), (1, 2, 4), (3,)])
def test_a_group_of_some_ranks(ranks: tuple[int, ...]) -> None:
    def rank(transport: InProcessTransport) -> tuple[torch.Tensor, ...] | None:
        if transport.rank not in ranks:
            return None
        group = Members(transport, ranks, "a test")
        assert (group.size, ranks[group.rank]) == (len(ranks), transport.rank)
        total = torch.full((21,), float(transport.rank))
        group.sum((total,)).wait()
        before = transport.traffic.sent_bytes("payload")
        work, gathered = group.gather(torch.tensor([transport.rank, 7]))
        work.wait()
        assert transport.traffic.sent_bytes("payload") - before == all_gather_sent(16, len(ranks))
        before = transport.traffic.sent_bytes("payload")
        rows = 10 * transport.rank + torch.arange(len(ranks) * 3).view(-1, 3)
        work, scattered = group.scatter(rows)
        work.wait()
        assert transport.traffic.sent_bytes("payload") - before == shard_exchange_sent(rows.nbytes, len(ranks))
        swapped = torch.zeros(2)
        if len(ranks) > 1 and group.rank < 2:
            group.swap(torch.full((2,), float(transport.rank)), swapped, 1 - group.rank).wait()
        return total, gathered, scattered, swapped

    results = InProcessCluster(5).run(rank)
    for place, member in enumerate(ranks):
        result = results[member]
        assert result is not None
        total, gathered, scattered, swapped = result
        assert torch.equal(total, torch.full((21,), float(sum(ranks))))
        assert gathered.tolist() == [[other, 7] for other in ranks]
        assert scattered.tolist() == [[10 * other + 3 * place + i for i in range(3)] for other in ranks]
        if len(ranks) > 1 and place < 2:
            assert swapped.tolist() == [float(ranks[1 - place])] * 2


def test_hosts() -> None:
    assert hosts_alone(3) == ((0,), (1,), (2,))
    assert hosts_of_size(5, 2) == ((0, 1), (2, 3), (4,))
    made = ALGORITHMS["hierarchical"](hosts_alone(4))
    assert (made.table == ring(4).table).all(), "with one rank on each host"
