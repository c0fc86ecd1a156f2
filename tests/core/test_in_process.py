"""Ranks as threads: every operation against its reference, and every way to go wrong."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.errors import CommunicationError, LaconicError, PeerLost
from tests.core.operations import CASES, Case

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_operation(case: Case, world_size: int) -> None:
    def rank(transport: InProcessTransport) -> tuple[torch.Tensor, dict[str, int]]:
        return case.run(transport), transport.traffic.by_operation()

    for index, (result, counted) in enumerate(InProcessCluster(world_size).run(rank)):
        expected = case.expected(index, world_size)
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected), f"rank {index}"
        sent = case.sent(index, world_size)
        key = case.operation.format(last=world_size - 1)
        assert {name: value for name, value in counted.items() if value} == ({key: sent} if sent else {})


def test_sums_are_formed_in_rank_order() -> None:
    # In fp32 1e8 swallows 1, so the order shows.
    values = [1e8, 1.0, 1.0, -1e8]

    def rank(transport: InProcessTransport) -> float:
        tensor = torch.tensor([values[transport.rank]])
        transport.all_reduce(tensor).wait()
        return tensor.item()

    for _ in range(5):
        assert InProcessCluster(4).run(rank) == [0.0] * 4


def test_operations_start_at_once_and_may_be_waited_for_later() -> None:
    def rank(transport: InProcessTransport) -> tuple[float, float]:
        first, second = torch.ones(3), torch.full((2,), 2.0)
        works = [transport.all_reduce(first), transport.all_reduce(second)]
        for work in reversed(works):
            work.wait()
            assert work.done()
        return first.sum().item(), second.sum().item()

    assert InProcessCluster(3).run(rank) == [(9.0, 12.0)] * 3


def test_work_is_not_done_before_all_have_come() -> None:
    cluster = InProcessCluster(2)
    first, second = cluster.transport(0), cluster.transport(1)
    mine, yours = torch.ones(1), torch.ones(1)
    work = first.all_reduce(mine)
    assert not work.done()
    assert mine.item() == 1
    other = second.all_reduce(yours)
    work.wait()
    other.wait()
    assert work.done()
    assert other.done()
    assert mine.item() == yours.item() == 2


def test_a_sent_tensor_may_change_afterwards() -> None:
    def rank(transport: InProcessTransport) -> float:
        if transport.rank == 0:
            tensor = torch.ones(1)
            transport.send_receive([(1, tensor)], []).wait()
            tensor.zero_()
            return 0.0
        received = torch.empty(1)
        transport.send_receive([], [(0, received)]).wait()
        return received.item()

    assert InProcessCluster(2).run(rank)[1] == 1.0


@pytest.mark.parametrize(
    ("second", "shown"),
    [
        (lambda t: t.all_gather(torch.empty(2, 4), torch.ones(4), what="bucket 1"), "all_gather of bucket 1, (4,)"),
        (lambda t: t.all_reduce(torch.ones(4), what="bucket 2"), "all_reduce(sum) of bucket 2, (4,)"),
        (lambda t: t.all_reduce(torch.ones(5), what="bucket 1"), "all_reduce(sum) of bucket 1, (5,)"),
        (lambda t: t.all_reduce(torch.ones(4), op="max", what="bucket 1"), "all_reduce(max) of bucket 1"),
        (lambda t: t.all_reduce(torch.ones(4).half(), what="bucket 1"), "torch.float16"),
        (lambda t: t.broadcast(torch.ones(4), what="bucket 1"), "broadcast(0) of bucket 1"),
    ],
)
def test_ranks_that_call_different_operations_see_both_calls(second, shown: str) -> None:
    errors: dict[int, str] = {}

    def rank(transport: InProcessTransport) -> None:
        work = transport.all_reduce(torch.ones(4), what="bucket 1") if transport.rank == 0 else second(transport)
        try:
            work.wait()
        except CommunicationError as error:
            errors[transport.rank] = str(error)
            raise

    with pytest.raises(CommunicationError, match="ranks disagree on operation 0"):
        InProcessCluster(2).run(rank)
    assert set(errors) == {0, 1}
    for message in errors.values():
        assert "rank 0 called all_reduce(sum) of bucket 1, (4,) torch.float32" in message
        assert f"rank 1 called {shown}" in message or shown in message.split("rank 1 called")[1]


def test_wrong_shapes_are_reported_to_every_rank_without_waiting() -> None:
    started_s = time.monotonic()
    errors: dict[int, Exception] = {}

    def rank(transport: InProcessTransport) -> None:
        try:
            # Room for three ranks where there are two.
            transport.all_gather(torch.empty(1, 4), torch.ones(4), what="bucket 1").wait()
        except Exception as error:
            errors[transport.rank] = error
            raise

    with pytest.raises(Exception, match=r"."):
        InProcessCluster(2, timeout_s=20).run(rank)
    assert set(errors) == {0, 1}
    assert time.monotonic() - started_s < 5


def test_receiving_something_else_than_was_sent() -> None:
    def rank(transport: InProcessTransport) -> None:
        if transport.rank == 0:
            transport.send_receive([(1, torch.ones(3))], []).wait()
        else:
            transport.send_receive([], [(0, torch.ones(4))], what="a shard").wait()

    with pytest.raises(CommunicationError, match=r"send_receive of a shard: rank 0 sent \(3,\).*expected \(4,\)"):
        InProcessCluster(2).run(rank)


def test_timeout_names_the_operation_and_what_the_absent_rank_does() -> None:
    cluster = InProcessCluster(3, timeout_s=0.3)
    present = threading.Barrier(3)

    def rank(transport: InProcessTransport) -> str:
        if transport.rank == 1:
            transport.set_status("reading a very large file")
        present.wait()
        if transport.rank == 1:
            time.sleep(1.5)
            return ""
        with pytest.raises(CommunicationError) as caught:
            transport.all_reduce(torch.ones(2), what="bucket 3").wait()
        return str(caught.value)

    messages = cluster.run(rank)
    for index in (0, 2):
        assert f"all_reduce(sum) of bucket 3 did not finish in 0.3 s on rank {index}" in messages[index]
        assert "rank 1 is reading a very large file" in messages[index]
        assert "\n" not in messages[index]


def test_timeout_of_a_receive_names_the_sender() -> None:
    def rank(transport: InProcessTransport) -> None:
        if transport.rank == 0:
            transport.send_receive([], [(1, torch.empty(1))], what="a shard").wait()

    with pytest.raises(
        CommunicationError, match=r"send_receive of a shard on rank 0 got nothing from rank 1 in 0\.2 s"
    ):
        InProcessCluster(2, timeout_s=0.2).run(rank)


@pytest.mark.parametrize("operation", ["collective", "receive"])
def test_a_rank_that_raises_stops_the_others_and_its_error_comes_out(operation: str) -> None:
    lost: dict[int, str] = {}
    started_s = time.monotonic()

    def rank(transport: InProcessTransport) -> None:
        if transport.rank == 1:
            raise ValueError("no more\ndata")
        try:
            if operation == "collective":
                transport.all_reduce(torch.ones(2), what="bucket 3").wait()
            else:
                transport.send_receive([], [(1, torch.empty(1))], what="bucket 3").wait()
        except PeerLost as error:
            lost[transport.rank] = str(error)
            raise

    with pytest.raises(ValueError, match="no more"):
        InProcessCluster(3, timeout_s=20).run(rank)
    assert time.monotonic() - started_s < 5
    assert set(lost) == {0, 2}
    for index, message in lost.items():
        assert f"of bucket 3 on rank {index} cannot finish: rank 1 raised ValueError: no more data" in message
        assert "\n" not in message


def test_check_and_fail() -> None:
    cluster = InProcessCluster(3)
    transports = [cluster.transport(rank) for rank in range(3)]
    for transport in transports:
        transport.raise_if_peer_failed()
    transports[2].announce_failure("ran out of memory")
    transports[0].announce_failure("came later")
    for transport in transports:
        with pytest.raises(PeerLost, match="rank 2 ran out of memory"):
            transport.raise_if_peer_failed()


def test_a_finished_operation_is_not_spoilt_by_a_later_failure() -> None:
    cluster = InProcessCluster(2)
    first, second = cluster.transport(0), cluster.transport(1)
    tensor = torch.ones(1)
    work = first.all_reduce(tensor)
    second.all_reduce(torch.ones(1)).wait()
    second.announce_failure("raised")
    work.wait()
    assert tensor.item() == 2


def test_close_twice_and_description() -> None:
    transport = InProcessCluster(2).transport(1)
    assert (transport.rank, transport.world_size) == (1, 2)
    assert "2" in transport.description
    transport.close()
    transport.close()


def test_results_come_in_rank_order_and_a_cluster_runs_again() -> None:
    cluster = InProcessCluster(4)

    def rank(transport: InProcessTransport) -> int:
        time.sleep(0.01 * (4 - transport.rank))
        total = torch.tensor([transport.rank])
        transport.all_reduce(total).wait()
        return 100 * int(total.item()) + transport.rank

    assert cluster.run(rank) == [600, 601, 602, 603]
    assert cluster.run(rank) == [600, 601, 602, 603]


def test_no_threads_stay_behind() -> None:
    before = threading.active_count()
    InProcessCluster(4).run(lambda transport: transport.all_reduce(torch.ones(1)).wait())
    assert threading.active_count() == before


@pytest.mark.parametrize("world_size", [0, -1])
def test_world_size_must_be_positive(world_size: int) -> None:
    with pytest.raises(LaconicError, match=f"world_size must be >= 1, got {world_size}"):
        InProcessCluster(world_size)
