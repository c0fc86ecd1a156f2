"""Inference services: Erlang's formula against requests one by one, and GPUs that follow the load."""

from __future__ import annotations

import heapq
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.cluster import Cluster, Link
from laconic.errors import UsageError
from laconic.jobs import POLICIES, Costs, Job, Phase, Service, parse_policy, read_services, run

CHAT = Service(
    name="chat", arrival_s=0.0, duration_s=400.0, requests_per_s=(2.0, 8.0), request_s=0.5, latency_s=1.5, gpus=1
)


def late_share_one_by_one(service: Service, replicas: int, requests_per_s: float, count: int) -> float:
    """Requests come at random and take the replica that is free first."""
    random = np.random.default_rng(0)
    arrivals = np.cumsum(random.exponential(1 / requests_per_s, count)).tolist()
    free_at = [0.0] * replicas
    late = 0
    for arrival, takes in zip(arrivals, random.exponential(service.request_s, count).tolist(), strict=True):
        begin = max(arrival, free_at[0])
        heapq.heapreplace(free_at, begin + takes)
        late += begin - arrival + service.request_s > service.latency_s
    return late / count


@pytest.mark.parametrize(("replicas", "requests_per_s"), [(1, 1.2), (2, 2.4), (4, 6.0)])
def test_late_requests_are_as_many_as_in_a_simulation_of_each(replicas: int, requests_per_s: float) -> None:
    exact = late_share_one_by_one(CHAT, replicas, requests_per_s, 60_000)
    assert CHAT.late_share(replicas, requests_per_s) == pytest.approx(exact, rel=0.15)


@given(st.floats(0.0, 200.0), st.floats(0.51, 20.0))
def test_one_replica_fewer_would_be_too_few(requests_per_s: float, latency_s: float) -> None:
    service = replace(CHAT, latency_s=latency_s)
    found = service.replicas(requests_per_s)
    assert service.late_share(found, requests_per_s) <= 0.01
    assert found == 1 or service.late_share(found - 1, requests_per_s) > 0.01


def training(duration_s: float) -> Job:
    return Job(
        name="train", arrival_s=0.0, gpus=4, phases=(Phase(until=1.0, work_per_s=1 / duration_s, steps_per_s=1.0),)
    )


def test_jobs_get_what_services_leave() -> None:
    cluster = Cluster(links=(Link(bandwidth_bps=1e10),) * 8)
    few, many = CHAT.replicas(2.0), CHAT.replicas(8.0)
    assert few <= 4 < many < 8
    found = run([training(300.0)], cluster, parse_policy("fifo"), Costs(round_s=100.0), services=[CHAT])
    (served,) = found.served
    assert served.requests == pytest.approx(200 * 2 + 200 * 8)
    assert served.late_share <= 0.01
    assert served.most_replicas == many
    assert served.gpu_s == pytest.approx(200 * few + 200 * many)
    # The job has GPUs for 200 s, waits while the service needs more than four, and goes on at 400.
    assert [(stay.begin_s, stay.end_s) for stay in found.stays] == [(0, 200), (400, 500)]


@pytest.mark.parametrize("policy", POLICIES.names())
def test_every_policy_makes_do_with_fewer_gpus(policy: str) -> None:
    cluster = Cluster(links=(Link(bandwidth_bps=1e10),) * 8)
    jobs = [replace(training(200.0), name=f"j{place}", gpus=(1, 1, 2)[place % 3]) for place in range(12)]
    costs = Costs(round_s=50.0, ahead_s=20.0)
    found = run(jobs, cluster, parse_policy(policy), costs, fidelity="throughput", services=[CHAT])
    assert found.served[0].late_share <= 0.01
    assert np.isfinite(found.finish_s).all()
    for begin_s in np.arange(0.0, 400.0, 50.0).tolist():
        used = sum(stay.gpus for stay in found.stays if stay.begin_s <= begin_s < stay.end_s)
        assert used <= 8 - CHAT.replicas(CHAT.load(begin_s, begin_s + 50))


def test_a_replica_that_starts_does_not_answer_yet() -> None:
    cluster = Cluster(links=(Link(bandwidth_bps=1e10),) * 8)
    costs = Costs(round_s=100.0, start_s=50.0)
    (served,) = run([training(10.0)], cluster, parse_policy("fifo"), costs, services=[CHAT]).served
    # Nobody answers for 50 s, and then too few for 50 s.
    late = 50 * 2 + 50 * 8 * CHAT.late_share(CHAT.replicas(2.0), 8.0)
    assert served.late_share == pytest.approx(late / 2000, abs=0.01)


def test_too_few_gpus_are_given_to_the_service_that_came_first() -> None:
    cluster = Cluster(links=(Link(bandwidth_bps=1e10),) * 4)
    second = replace(CHAT, name="second", arrival_s=1.0)
    found = run(
        [training(100.0)], cluster, parse_policy("max_min_fairness"), Costs(round_s=100.0), services=[second, CHAT]
    )
    first, other = found.served
    assert (first.service.name, other.service.name) == ("chat", "second")
    assert first.late_share < other.late_share
    assert found.stays[0].begin_s >= 400


def test_a_file_of_services(tmp_path: Path) -> None:
    path = tmp_path / "services.csv"
    head = "service,arrival_s,duration_s,requests_per_s,request_s,latency_s"
    path.write_text(f"{head},gpus\nchat,0,3600,2;8;3,0.5,1.5,2\n")
    (found,) = read_services(path)
    assert (found.requests_per_s, found.gpus) == ((2.0, 8.0, 3.0), 2)
    assert [found.load(begin, begin + 1) for begin in (0, 1200, 2400, 3600)] == [2, 8, 3, 0]
    for line, told in (
        ("chat,0,3600,2,0.5,0.5", "cannot be kept"),
        ("chat,0,3600,many,0.5,1", "requests_per_s must be a number"),
        ("chat,0,-1,2,0.5,1", "duration_s must be above 0"),
        (",0,10,2,0.5,1", "a name"),
    ):
        path.write_text(f"{head}\n{line}\n")
        with pytest.raises(UsageError, match=f"line 2: .*{told}"):
            read_services(path)
