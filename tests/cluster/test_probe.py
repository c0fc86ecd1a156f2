"""The probe on ranks whose times are known, because a link in software makes them."""

from __future__ import annotations

import threading

import pytest
import torch

from laconic.cluster import Curve, Measured
from laconic.cluster.probe import check_hosts, cluster_of, probe
from laconic.core.clock import WallClock
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.paced import PacedLink, PacedTransport
from laconic.core.transport import Transport, Work
from laconic.errors import CommunicationError, UsageError

SIZES = (1024, 4096, 65_536, 262_144)


def paced(transport: Transport, bandwidth_bps: float, delay_s: float = 0.0) -> Transport:
    return PacedTransport(transport, PacedLink(bandwidth_bps, delay_s=delay_s))


@pytest.mark.slow
def test_it_finds_the_bandwidth_of_a_slow_link_and_all_ranks_agree() -> None:
    """80 Mbit/s is 10 bytes per microsecond: 256 KiB take 26 ms, far more than threads need."""
    told: list[str] = []

    def one_rank(transport: InProcessTransport) -> Measured:
        say = told.append if transport.rank == 0 else None
        return probe(paced(transport, 80e6), WallClock(), sizes=SIZES, limit_s=20, on_progress=say)

    results = InProcessCluster(2).run(one_rank)
    assert results[0] == results[1]
    measured = results[0]
    assert [curve.kind for curve in measured.curves] == ["all_reduce", "all_gather", "all_to_all", "send"]
    assert "paced at 80mbit" in measured.transport
    for curve in measured.curves:
        assert curve.world_size == 2
        assert curve.sizes == SIZES
        sent_per_s = curve.plateau_bytes_per_s * curve.sent_bytes(1000) / 1000
        assert sent_per_s == pytest.approx(10e6, rel=0.3), curve
    assert told[0].startswith("1.0 KiB: all_reduce ")
    assert told[1].startswith("each further: all_reduce ")
    made = cluster_of(measured, ((0,), (1,)), name="two", source="A test.")
    assert (made.num_hosts, made.num_devices, made.inside) == (2, 2, None)
    assert made.links[0].bandwidth_bps == pytest.approx(80e6, rel=0.3)
    assert type(made).from_toml(made.to_toml()) == made


def test_operations_in_flight_share_their_start_up() -> None:
    """A delay of 4 ms is the start-up of one, and next to nothing for each further one."""

    def one_rank(transport: InProcessTransport) -> Measured:
        return probe(paced(transport, 1e9, delay_s=0.004), WallClock(), sizes=(64, 1024), limit_s=5)

    measured = InProcessCluster(2).run(one_rank)[0]
    curve = measured.curve("all_reduce")
    assert curve is not None
    assert curve.startup_s >= 0.004
    assert curve.issue_s < curve.startup_s / 2


def test_sizes_stop_growing_when_time_is_up() -> None:
    def one_rank(transport: InProcessTransport) -> Measured:
        # 1 MB/s: 64 KiB take 66 ms, of which each operation would want six.
        return probe(paced(transport, 8e6), WallClock(), sizes=(*SIZES, 10**9), limit_s=0.1)

    for curve in InProcessCluster(2).run(one_rank)[0].curves:
        assert 2 <= len(curve.sizes) <= 3


def test_other_algorithms_and_pairs() -> None:
    calls = threading.Semaphore(0)

    def one_rank(transport: InProcessTransport) -> Measured:
        def sum_twice(tensor: torch.Tensor) -> Work:
            calls.release()
            transport.all_reduce(tensor, purpose="control").wait()
            return transport.all_reduce(tensor, purpose="control")

        measured = probe(
            transport, WallClock(), sizes=(1024, 2048), algorithms={"twice": sum_twice}, pairs=True, limit_s=5
        )
        assert transport.traffic.sent_bytes("payload") == 0
        return measured

    measured = InProcessCluster(3).run(one_rank)[0]
    assert "all_reduce(twice)" in [curve.kind for curve in measured.curves]
    assert calls.acquire(blocking=False)
    assert len(measured.pairs_bps) == 3
    for source, row in enumerate(measured.pairs_bps):
        assert [rate > 0 for rate in row] == [source != destination for destination in range(3)]
    # A row per rank must divide evenly: among three ranks 1024 bytes become 1020.
    exchange = measured.curve("all_to_all")
    assert exchange is not None
    assert exchange.sizes == (1020, 2040)


def test_inside_and_between_hosts_are_told_apart() -> None:
    hosts = ((0, 1), (2, 3))

    def one_rank(transport: InProcessTransport) -> Measured:
        return probe(transport, WallClock(), sizes=(1024, 4096), limit_s=5)

    measured = InProcessCluster(4, hosts=hosts).run(one_rank)[0]
    assert measured.curve("send(inside)") is not None
    assert measured.curve("send(between)") is not None


def curve(kind: str, startup_s: float, bytes_per_s: float) -> Curve:
    sizes = (1000, 1_000_000)
    return Curve(kind=kind, world_size=4, sizes=sizes, seconds=tuple(startup_s + size / bytes_per_s for size in sizes))


def test_the_cluster_that_was_measured() -> None:
    measured = Measured(
        curves=(curve("send", 1e-3, 1e7), curve("send(inside)", 2e-4, 1e9), curve("send(between)", 6e-4, 2e7))
    )
    made = cluster_of(measured, ((0, 1), (2, 3)))
    assert made.devices_per_host == 2
    assert made.inside is not None
    assert (made.inside.bandwidth_bps, made.inside.delay_s) == pytest.approx((8e9, 1e-4))
    # Of 600 us between hosts, 200 are the devices' ports; a message crosses two links.
    assert (made.links[0].bandwidth_bps, made.links[0].delay_s) == pytest.approx((1.6e8, 2e-4))
    assert cluster_of(measured, ((0, 1), (2, 3)), bandwidth_bps=2e8).links[0].bandwidth_bps == 2e8
    alone = cluster_of(measured, ((0, 1, 2, 3),))
    assert (alone.num_hosts, alone.devices_per_host) == (1, 4)


@pytest.mark.parametrize(
    ("hosts", "told"),
    [
        (((0, 1), (2,)), r"different numbers of ranks \(2, 1\)"),
        (((0, 2), (1, 3)), "numbered host by host"),
    ],
)
def test_hosts_that_a_cluster_cannot_describe(hosts: tuple[tuple[int, ...], ...], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        check_hosts(hosts)


@pytest.mark.parametrize("sizes", [(1024,), (1024, 1024), (2, 1024)])
def test_sizes_that_say_nothing(sizes: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="at least two sizes of 4 bytes or more"):
        InProcessCluster(2).run(lambda transport: probe(transport, WallClock(), sizes=sizes))


def test_one_rank_measures_nothing() -> None:
    with pytest.raises(UsageError, match="nothing to measure with one rank"):
        probe(InProcessCluster(1).transport(0), WallClock())


def test_a_rank_that_is_missing_ends_the_wait() -> None:
    cluster = InProcessCluster(2, timeout_s=0.3)

    def one_rank(transport: InProcessTransport) -> None:
        if transport.rank == 0:
            probe(transport, WallClock(), sizes=(1024, 2048))

    with pytest.raises(CommunicationError, match=r"a trial did not finish in 0.3 s on rank 0: rank 1 is"):
        cluster.run(one_rank)
