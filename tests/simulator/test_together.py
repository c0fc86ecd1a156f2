"""Several jobs on one fabric."""

from __future__ import annotations

import pytest

from laconic.cluster import Cluster, Link, Racks
from laconic.errors import UsageError
from laconic.simulator import simulate
from laconic.simulator.network.flow import FlowNetwork
from laconic.simulator.together import Tenant, simulate_together
from tests.simulator.jobs import RATE, hosts, job

NBYTES = 10_000_000
JOB = job((0.0, 0.01, NBYTES))
UPLINK = Cluster(
    links=(Link(bandwidth_bps=8 * RATE),) * 8,
    topology=Racks(sizes=(4, 4), uplinks=(Link(bandwidth_bps=8 * RATE),) * 2),
)
SEQUENTIAL = "bsp / all_reduce / none / sequential"


def tenant(*devices: int, strategy: str = SEQUENTIAL, workload=JOB) -> Tenant:
    return Tenant(strategy=strategy, workload=workload, devices=devices)


def test_a_job_by_itself_takes_what_the_flow_level_says() -> None:
    for strategy in (SEQUENTIAL, "wfbp-a2a", "bsp-ps", "d-psgd", "local_sgd(period=3)"):
        (found,) = simulate_together([tenant(0, 1, 2, 3, strategy=strategy)], hosts(4))
        alone = simulate(strategy, JOB, hosts(4), network=FlowNetwork(hosts(4))).prediction
        assert found.alone_s == pytest.approx(alone.step_s, rel=1e-3)
        assert found.together_s == pytest.approx(found.alone_s)
        assert found.slowdown == pytest.approx(1)


def test_jobs_on_links_of_their_own_do_not_notice_each_other() -> None:
    for found in simulate_together([tenant(0, 1, 2, 3), tenant(4, 5, 6, 7)], UPLINK):
        assert found.together_s == pytest.approx(found.alone_s)


def test_two_jobs_share_an_uplink_fairly() -> None:
    """Each has a rank in both racks; both begin together, so that what they send always meets."""
    found = simulate_together([tenant(0, 4), tenant(1, 5)], UPLINK)
    for shared in found:
        # A ring of two sends N in all.
        assert shared.alone_s == pytest.approx(0.01 + NBYTES / RATE, rel=1e-4)
        assert shared.together_s == pytest.approx(0.01 + 2 * NBYTES / RATE, rel=1e-4)
        assert shared.slowdown == pytest.approx(0.03 / 0.02, rel=1e-4)


@pytest.mark.slow
def test_a_job_with_short_steps_does_not_leave_one_with_long_steps_alone() -> None:
    long = job((0.0, 1.0, 100 * NBYTES))
    short = job((0.0, 0.001, NBYTES // 10))
    slow, quick = simulate_together([tenant(0, 4, workload=long), tenant(1, 5, workload=short)], UPLINK)
    assert slow.alone_s == pytest.approx(2.0, rel=1e-4)
    # While the long one moves, the short one computes 1 ms and then moves for 2 instead of 1: the long one has half of
    # the link two thirds of the time, 2/3 of what it needs; of its steps of 1 s + 1.5 s the short one is slow in 1.5 s.
    assert slow.together_s == pytest.approx(2.5, rel=0.01)
    assert quick.together_s == pytest.approx(2.5 / (1.0 / 0.002 + 1.5 / 0.003), rel=0.01)


def test_codecs_count_and_places_matter() -> None:
    near, far = (
        simulate_together([tenant(*devices, strategy="bsp-ps")], UPLINK)[0].alone_s
        for devices in ((0, 1, 2, 3), (0, 1, 4, 5))
    )
    assert far > near


def test_hierarchical_beside_others_needs_whole_hosts() -> None:
    boxes = Cluster(links=(Link(bandwidth_bps=8 * RATE),) * 4, devices_per_host=2, inside=Link(bandwidth_bps=80 * RATE))
    strategy = "bsp / all_reduce(algorithm=hierarchical) / none / sequential"
    found = simulate_together([tenant(2, 3, 4, 5, strategy=strategy), tenant(0, 6)], boxes)
    assert found[0].together_s == pytest.approx(found[0].alone_s)
    with pytest.raises(UsageError, match="whole hosts only"):
        simulate_together([tenant(1, 2, 3, 4, strategy=strategy)], boxes)


@pytest.mark.parametrize(
    ("tenants", "words"),
    [
        ([], "no job"),
        ([tenant()], "job 0 has no device"),
        ([tenant(0, 8)], "there is no device 8; devices are numbered 0 to 7"),
        ([tenant(0, -1)], "no device -1"),
        ([tenant(0, 1), tenant(2, 1)], "device 1 is given to job 0 and to job 1"),
        ([tenant(0, 0)], "device 0 is given to job 0 and to job 0"),
    ],
)
def test_devices_that_cannot_be_used_are_refused(tenants: list[Tenant], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        simulate_together(tenants, UPLINK)
