"""The transport over torch.distributed on real processes: every operation, and ranks that fail, sleep or die."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch
import torch.distributed as dist

from laconic.core.torch_distributed import TorchTransport
from laconic.errors import AttachError
from tests.core.operations import CASES, Case, contribution
from tests.processes import RankResult, SignalAfterLine, run_processes, start_together

gloo = [pytest.mark.dist, pytest.mark.timeout(100)]


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def operations(request: pytest.FixtureRequest) -> list[RankResult]:
    return run_processes(
        "tests.core.gloo_ranks:operations", world_size=request.param, arguments={"word": "hello"}, timeout_s=80
    )


class TestOperations:
    pytestmark = gloo

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
    def test_result_and_bytes(self, operations: list[RankResult], case: Case) -> None:
        n = len(operations)
        for rank, ran in enumerate(operations):
            found = ran.value[case.label]
            expected = case.expected(rank, n)
            assert found["result"].dtype == expected.dtype
            assert torch.equal(found["result"], expected), f"rank {rank}"
            sent = case.sent(rank, n)
            assert found["sent"] == ({case.operation.format(last=n - 1): sent} if sent else {})

    def test_the_scripts_own_operations_do_not_mix_with_ours(self, operations: list[RankResult]) -> None:
        n = len(operations)
        for ran in operations:
            mixed = ran.value["mixed"]
            for name, dtype in (("ours", torch.float32), ("theirs", torch.float64)):
                assert torch.equal(mixed[name], sum(contribution(rank, dtype, 1000) for rank in range(n)))
            assert mixed["gathered"].tolist() == [[float(rank)] * 3 for rank in range(n)]

    def test_sums_of_shards_have_the_bits_of_gloos_own(self, operations: list[RankResult]) -> None:
        for ran in operations:
            assert ran.value["sums unlike Gloo's"] == []

    def test_a_group_of_some_ranks(self, operations: list[RankResult]) -> None:
        n = len(operations)
        for rank, ran in enumerate(operations):
            found = ran.value["group of two"]
            if rank not in (0, n - 1):
                assert found is None
                continue
            mine = 0 if rank == 0 else 1
            assert (found["rank"], found["world_size"]) == (mine, 2)
            assert found["from 1"].tolist() == [float(n - 1)]
            assert found["received"].tolist() == [10.0 + (1 - mine)]

    def test_each_process_is_a_rank_with_one_thread(self, operations: list[RankResult]) -> None:
        for rank, ran in enumerate(operations):
            assert (ran.rank, ran.exit_code) == (rank, 0)
            assert (ran.value["word"], ran.value["threads"]) == ("hello", 1)
            assert ran.value["port"] == operations[0].value["port"]
            assert f"I am rank {rank}" in ran.stdout.splitlines()

    def test_description(self, operations: list[RankResult]) -> None:
        for ran in operations:
            assert "gloo" in ran.value["description"]
            assert f"{len(operations)} ranks" in ran.value["description"]


@pytest.fixture(scope="module")
def begun() -> dict[str, Future[list[RankResult]]]:
    """What can go wrong, at the same time: most of it is waiting."""

    def kill(victim: int) -> dict[str, object]:
        return {
            "target": "tests.core.gloo_ranks:wait_for_a_killed_rank",
            "world_size": 3,
            "arguments": {"victim": victim},
            "timeout_s": 80,
            "send_signal": SignalAfterLine(victim, "kill me", signal.SIGKILL),
        }

    trouble = {"target": "tests.core.gloo_ranks:trouble", "world_size": 3, "timeout_s": 80}
    return start_together({"trouble": trouble, "kill 2": kill(2), "kill 0": kill(0)})


@pytest.fixture(scope="module")
def trouble(begun: dict[str, Future[list[RankResult]]]) -> list[RankResult]:
    return begun["trouble"].result()


@pytest.mark.slow
class TestTrouble:
    pytestmark = gloo

    def test_a_rank_that_says_it_has_failed(self, trouble: list[RankResult]) -> None:
        for rank in (0, 2):
            told = trouble[rank].value["told"]
            assert told["kind"] == "PeerLost", told
            assert told["message"] == (
                f"all_reduce(sum) of bucket 3 on rank {rank} cannot finish: rank 1 raised ValueError: no more data."
            )
            assert told["seconds"] < 10, "well before the timeout of 30 s"
            for later in ("check", "next"):
                assert trouble[rank].value[later]["kind"] == "PeerLost"
                assert "rank 1 raised ValueError: no more data" in trouble[rank].value[later]["message"]

    def test_a_rank_that_lives_but_does_not_come(self, trouble: list[RankResult]) -> None:
        messages = {rank: trouble[rank].value["absent"] for rank in (0, 2)}
        for rank, absent in messages.items():
            assert absent["kind"] in ("CommunicationError", "PeerLost"), absent
            assert f"all_reduce(sum) of bucket 5 on rank {rank}" in absent["message"]
            assert len(absent["message"].splitlines()) == 1
            assert 0.5 < absent["seconds"] < 7, absent
            # Whoever gives up first says what it saw, and the others repeat it: none of them is to blame.
            assert 'rank 1 says "reading a very large file"' in absent["message"]
        assert "CommunicationError" in [absent["kind"] for absent in messages.values()]

    def test_a_later_transport_starts_afresh(self, trouble: list[RankResult]) -> None:
        for rank in range(3):
            later = trouble[rank].value["later"]
            assert later["received"].tolist() == [float((rank - 1) % 3)] * 4
            assert later["total"].tolist() == [3.0, 3.0]

    def test_a_rank_that_does_not_attach(self, trouble: list[RankResult]) -> None:
        for rank in (0, 2):
            attach = trouble[rank].value["attach"]
            assert attach["kind"] == "PeerLost", attach
            assert f"attaching on rank {rank} cannot finish: rank 1 did not attach" in attach["message"]
            assert attach["seconds"] < 10


class TestKill:
    pytestmark = gloo

    def test_kill_9_of_a_rank(self, begun: dict[str, Future[list[RankResult]]]) -> None:
        survivors, killed = _without(2, begun["kill 2"].result())
        for ran in survivors:
            assert ran.value["kind"] == "PeerLost", ran.value
            assert ran.value["message"] == (
                f"all_reduce(sum) of bucket 7 on rank {ran.rank} cannot finish: rank 2 stopped answering; "
                'it last said "step 2".'
            )
            assert ran.ended_s - killed.ended_s < 10, "within a few seconds, not after the timeout of 60 s"
            assert ran.value["close_s"] < 5

    def test_kill_9_of_the_rank_that_hosts_the_store(self, begun: dict[str, Future[list[RankResult]]]) -> None:
        survivors, killed = _without(0, begun["kill 0"].result())
        for ran in survivors:
            assert ran.value["kind"] == "PeerLost", ran.value
            assert f"all_reduce(sum) of bucket 7 on rank {ran.rank} cannot finish: rank 0" in ran.value["message"]
            assert "gone" in ran.value["message"]
            assert ran.ended_s - killed.ended_s < 10
            assert ran.value["close_s"] < 5


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(60)
def test_a_group_goes_on_where_rank_0_hosts_the_store_for_another_group_and_has_ended() -> None:
    ran = run_processes("tests.core.gloo_ranks:outlive_the_store", world_size=4, arguments={"detaches": True})
    host, second, _, fourth = (one.value for one in ran)
    assert 2 < host["close_s"] < 6, "rank 0 waits a moment for the ranks of other groups"
    for one in (second, fourth):
        assert one["waited_s"] > 2
        assert one["total"].eq(4).all()
        assert one["close_s"] < 3
    assert second["kind"] == "CommunicationError"
    assert second["message"].startswith("all_reduce(sum) of bucket 1 failed on rank 0: ")
    assert second["message"].endswith("the job's rank 0 has ended, and with it the store that tells what others do.")


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(60)
def test_a_group_does_not_go_on_where_rank_0_of_another_group_has_died() -> None:
    results = run_processes(
        "tests.core.gloo_ranks:outlive_the_store", world_size=4, arguments={"detaches": False}, may_fail=True
    )
    for one in (results[1].value, results[3].value):
        assert one["kind"] == "PeerLost", one
        assert "rank 0 or the launcher, which hosts the job's store, is gone" in one["message"]
        assert one["seconds"] < 10


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(100)
def test_the_host_of_the_store_killed_while_others_attach_is_named() -> None:
    results = run_processes(
        "tests.core.gloo_ranks:attach_while_the_store_is_killed",
        world_size=3,
        timeout_s=90,
        send_signal=SignalAfterLine(0, "kill me"),
    )
    survivors, killed = _without(0, results)
    for ran in survivors:
        assert ran.value["kind"] == "PeerLost", ran.value
        assert "rank 0 or the launcher, which hosts the job's store, is gone" in ran.value["message"]
        assert f"attaching on rank {ran.rank} " in ran.value["message"]
        assert "did not finish in 40 s" not in ran.value["message"]
        assert ran.ended_s - killed.ended_s < 20


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(60)
def test_a_rank_that_ends_while_gloo_connects_leaves_no_thread() -> None:
    found = run_processes(
        "tests.core.gloo_ranks:attach_while_a_rank_ends", world_size=2, arguments={"timeout_s": 4.0}, timeout_s=50
    )[0].value
    assert found["kind"] == "PeerLost", found
    assert "rank 1 stopped answering" in found["message"]
    assert found["thread_s"] < 1.0 + 4.0 + 2.0


@pytest.mark.dist
@pytest.mark.timeout(60)
def test_gloo_waits_for_a_late_rank_all_the_time_there_is() -> None:
    results = run_processes(
        "tests.core.gloo_ranks:attach_while_a_rank_is_late",
        world_size=2,
        arguments={"timeout_s": 5.0, "late_s": 3.0},
        timeout_s=50,
    )
    assert [result.value for result in results] == [2.0, 2.0]


def _without(victim: int, results: list[RankResult]) -> tuple[list[RankResult], RankResult]:
    assert results[victim].exit_code == -signal.SIGKILL
    return [result for result in results if result.rank != victim], results[victim]


def test_without_a_process_group() -> None:
    with pytest.raises(
        AttachError, match=r"no process group: call torch\.distributed\.init_process_group\(\)"
    ) as caught:
        TorchTransport()
    assert "\n" not in str(caught.value)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
class TestAlone:
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
    def test_one_rank_needs_no_network(self, case: Case) -> None:
        transport = TorchTransport()
        before = threading.active_count()
        assert torch.equal(case.run(transport), case.expected(0, 1))
        assert transport.traffic.sent_bytes() == 0
        assert threading.active_count() == before
        transport.close()

    def test_close_twice_and_check(self) -> None:
        transport = TorchTransport()
        transport.set_status("step 1")
        transport.raise_if_peer_failed()
        transport.announce_failure("raised")
        transport.close()
        transport.close()

    def test_not_a_member(self) -> None:
        with pytest.raises(AttachError, match="not a member"):
            TorchTransport(dist.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]
