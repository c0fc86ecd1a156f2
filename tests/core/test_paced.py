"""Paced links: time as the formula says, values, order and byte counts as without; DDP the same, bit for bit."""

from __future__ import annotations

import inspect
import math
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.clock import VirtualClock
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.paced import PacedLink, PacedTransport, link_from_environment
from laconic.core.paced_ddp import pace_ddp
from laconic.core.torch_distributed import TorchTransport
from laconic.core.transport import Transport
from laconic.errors import AttachError, CommunicationError, LaconicError, PeerLost
from tests.core.operations import CASES, Case
from tests.processes import RankResult, gloo_group, run_processes

FAST_BPS = 1e12


class TestLink:
    def test_bytes_queue_behind_each_other_and_delay_does_not_hold_the_link(self) -> None:
        clock = VirtualClock(10.0)
        link = PacedLink(8e6, delay_s=0.5, clock=clock)  # a megabyte per second
        assert link.reserve(1_000_000) == pytest.approx(11.5)
        assert link.reserve(2_000_000) == pytest.approx(13.5)
        clock.advance_to(20.0)  # the link has been idle
        assert link.reserve(1_000_000) == pytest.approx(21.5)
        assert link.reserve(0) == pytest.approx(20.5)  # nothing to send: nothing to queue

    @pytest.mark.parametrize("bandwidth_bps", [0.0, -1.0, math.inf, math.nan])
    def test_impossible_bandwidths(self, bandwidth_bps: float) -> None:
        with pytest.raises(LaconicError, match="bandwidth of a paced link must be > 0 and finite"):
            PacedLink(bandwidth_bps)

    def test_impossible_delays(self) -> None:
        with pytest.raises(LaconicError, match="delay of a paced link must be >= 0"):
            PacedLink(1e6, delay_s=-1)

    def test_from_the_environment(self) -> None:
        assert link_from_environment({}) is None
        link = link_from_environment({"LACONIC_PACE": "100mbit"})
        assert link is not None
        assert (link.bandwidth_bps, link.delay_s, str(link)) == (100e6, 0.0, "paced at 100mbit")

    @pytest.mark.parametrize("text", ["fast", "", "0mbit", "-5mbit", "5ms"])
    def test_a_rate_that_cannot_be_used(self, text: str) -> None:
        with pytest.raises(AttachError, match=r"environment variable LACONIC_PACE must be .*[Uu]nset the variable"):
            link_from_environment({"LACONIC_PACE": text})


class TestTransport:
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
    @pytest.mark.parametrize("n", [1, 3])
    def test_values_and_byte_counts_are_unchanged(self, case: Case, n: int) -> None:
        def one_rank(transport: InProcessTransport) -> tuple[torch.Tensor, int]:
            result = case.run(PacedTransport(transport, PacedLink(FAST_BPS)))
            return result, transport.traffic.total_bytes

        for rank, (found, sent) in enumerate(InProcessCluster(n).run(one_rank)):
            expected = case.expected(rank, n)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
            assert sent == (case.sent(rank, n) if n > 1 else 0)

    def test_time_is_that_of_the_link_and_operations_queue(self) -> None:
        def one_rank(transport: InProcessTransport) -> tuple[list[float], list[bool]]:
            paced = PacedTransport(transport, PacedLink(80e6))
            began_s = time.perf_counter()
            # With two ranks an all-reduce sends as many bytes as it has: 1 MB, a tenth of a second.
            works = [paced.all_reduce(torch.ones(250_000)) for _ in range(2)]
            done = [work.done() for work in works]
            times = []
            for work in works:
                work.wait()
                times.append(time.perf_counter() - began_s)
            return times, [*done, *(work.done() for work in works)]

        for (first, second), done in InProcessCluster(2).run(one_rank):
            assert 0.1 <= first < second
            assert 0.2 <= second < 1.0
            assert done == [False, False, True, True]

    def test_who_only_receives_is_not_held_back(self) -> None:
        def one_rank(transport: InProcessTransport) -> float:
            paced = PacedTransport(transport, PacedLink(80e6))
            letter = torch.ones(500_000)
            began_s = time.perf_counter()
            if transport.rank == 0:
                paced.send_receive([(1, letter)], []).wait()
            else:
                paced.send_receive([], [(0, letter)]).wait()
            return time.perf_counter() - began_s

        sender_s, receiver_s = InProcessCluster(2).run(one_rank)
        assert receiver_s < 0.2 <= sender_s

    def test_everything_of_the_protocol_is_passed_on(self) -> None:
        inner = InProcessCluster(2, timeout_s=1).transport(1)
        paced: Transport = PacedTransport(inner, PacedLink(100e6))
        public = {name for name, _ in inspect.getmembers(Transport) if not name.startswith("_")}
        assert public <= set(dir(paced))
        assert (paced.rank, paced.world_size, paced.traffic) == (1, 2, inner.traffic)
        assert paced.control_device == inner.control_device
        assert paced.description == "2 threads of one process, paced at 100mbit"
        paced.acquire()
        with pytest.raises(AttachError):
            inner.acquire()
        paced.release()
        inner.acquire()
        paced.set_status("having lunch")
        assert inner.cluster._status == {1: "having lunch"}
        assert paced.known_failure() is None
        paced.announce_failure("stumbled")
        assert isinstance(paced.known_failure(), PeerLost)
        with pytest.raises(PeerLost, match="stumbled"):
            paced.raise_if_peer_failed()
        paced.close()

    def test_a_link_too_slow_for_the_time_limit_raises_at_once(self) -> None:
        def one_rank(transport: InProcessTransport) -> None:
            paced = PacedTransport(transport, PacedLink(8e3), timeout_s=5)
            with pytest.raises(
                CommunicationError, match=r"976\.6 KiB behind .* need 1e\+03 s on a link paced at 8kbit"
            ):
                paced.all_reduce(torch.ones(250_000), what="bucket 3").wait()

        began_s = time.monotonic()
        InProcessCluster(2).run(one_rank)
        assert time.monotonic() - began_s < 5

    def test_a_failed_peer_ends_the_wait_for_the_link(self) -> None:
        def one_rank(transport: InProcessTransport) -> float:
            paced = PacedTransport(transport, PacedLink(1e6))  # 8 s
            work = paced.all_reduce(torch.ones(250_000))
            began_s = time.monotonic()
            if transport.rank == 1:
                threading.Timer(0.2, transport.announce_failure, ("gave up",)).start()
                return 0.0
            with pytest.raises(PeerLost, match="rank 1 gave up"):
                work.wait()
            return time.monotonic() - began_s

        assert InProcessCluster(2).run(one_rank)[0] < 4


RATE_BPS = 40e6


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(100, 500), nn.ReLU(), nn.Linear(500, 500), nn.ReLU(), nn.Linear(500, 10))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _train(
    model: nn.Module, forward: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4
) -> tuple[dict[str, torch.Tensor], float]:
    """The parameters after some steps, and the median time of one backward pass."""
    took_s = []
    for step in range(steps):
        inputs = torch.randn(8, 100, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        began_s = time.perf_counter()
        forward(inputs).square().mean().backward()
        took_s.append(time.perf_counter() - began_s)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}, sorted(took_s)[steps // 2]


def on_gloo() -> dict[str, object]:
    """What each rank of the tests below does; LACONIC_PACE is set."""
    with gloo_group():
        transport = PacedTransport(TorchTransport(timeout_s=30), PacedLink(FAST_BPS))
        results = {case.label: case.run(transport) for case in CASES}
        transport.close()
        found: dict[str, object] = {"operations": results, "description": transport.description}

        model = _model()
        found["ddp"], _ = _train(model, DistributedDataParallel(model, bucket_cap_mb=0.5), _sgd(model))
        model = _model()
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.5)
        pace_ddp(wrapped, PacedLink(RATE_BPS))
        found["paced ddp"], found["paced ddp seconds"] = _train(model, wrapped, _sgd(model))
        found["bytes"] = sum(parameter.nbytes for parameter in model.parameters())
        found["refused"] = []
        for awkward in (wrapped, DistributedDataParallel(_model(), gradient_as_bucket_view=True)):
            try:
                pace_ddp(awkward, PacedLink(RATE_BPS))
            except LaconicError as exc:
                found["refused"].append(str(exc))

        model = _model()
        with laconic.attach(model, _sgd(model), "ddp", transport=InProcessCluster(1).transport(0)) as own:
            found["own transport"] = own._job.transport.description
        model = _model()
        optimizer = _sgd(model)
        with laconic.attach(model, optimizer, "ddp", timeout_s=30) as session:
            found["session"] = session._job.transport.description
            found["laconic"], found["laconic seconds"] = _train(model, model, optimizer)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[RankResult]:
    # Three: the mean of three is rounded, so that another order of operations would show.
    return run_processes("tests.core.test_paced:on_gloo", world_size=3, environment={"LACONIC_PACE": "40mbit"})


@pytest.mark.dist
@pytest.mark.timeout(100)
class TestOnGloo:
    def test_values_are_unchanged(self, ranks: list[RankResult]) -> None:
        for rank, ran in enumerate(ranks):
            assert "gloo" in ran.value["description"]
            for case in CASES:
                assert torch.equal(ran.value["operations"][case.label], case.expected(rank, 3)), case.label

    def test_ddp_is_equal_bit_for_bit_and_takes_the_time_of_the_link(self, ranks: list[RankResult]) -> None:
        for ran in ranks:
            for name, expected in ran.value["ddp"].items():
                assert torch.equal(ran.value["paced ddp"][name], expected), name
            least_s = 2 * 2 / 3 * ran.value["bytes"] * 8 / RATE_BPS
            # Measured from the start of the backward pass; the first bucket leaves while it still goes on.
            assert least_s <= ran.value["paced ddp seconds"] < 3 * least_s

    def test_ddp_that_cannot_be_paced_alike_is_refused(self, ranks: list[RankResult]) -> None:
        for ran in ranks:
            already, views = ran.value["refused"]
            assert "already has a communication hook" in already
            assert "gradient_as_bucket_view" in views

    def test_attach_takes_its_pace_from_the_environment(self, ranks: list[RankResult]) -> None:
        for ran in ranks:
            assert ran.value["session"].endswith("3 ranks, paced at 40mbit")
            assert "paced" not in ran.value["own transport"]
            least_s = 2 * 2 / 3 * ran.value["bytes"] * 8 / RATE_BPS
            assert least_s <= ran.value["laconic seconds"] < 3 * least_s
            for name, expected in ran.value["ddp"].items():
                assert torch.allclose(ran.value["laconic"][name], expected)
