"""Several jobs on one fabric: each computes on devices of its own, and all share the links between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from laconic.cluster import Cluster
from laconic.core.moment import Moment
from laconic.errors import UsageError
from laconic.simulator.engine import GraphBuilder, run
from laconic.simulator.lowering.task_graph import Inputs, RankClass, TaskGraph
from laconic.simulator.network.flow import FlowNetwork
from laconic.simulator.network.pair_rates import pair_rates
from laconic.simulator.planning import candidates, settled
from laconic.simulator.prediction import Shared
from laconic.simulator.simulation import codec_of, hosts_of
from laconic.simulator.steps import draw_steps, pace, period_of
from laconic.strategy import Strategy, as_strategy
from laconic.workload import Workload

_PERIODS = 12
_MOST_STEPS = 20_000
_LATEST_S = 1e5


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """One job and its devices."""

    strategy: Strategy | str
    workload: Workload
    devices: Sequence[int]
    """The device of each rank; no device has two ranks."""
    start_s: float = 0.0
    """How much later than the first job it begins."""


def simulate_together(tenants: Sequence[Tenant], cluster: Cluster, *, message_s: float = 0.0) -> list[Shared]:
    """The step time of each job when all run at the same time, and when it has the fabric to itself.

    Jobs start together, or at their `start_s`, and run for about the same time, the slowest of them for a dozen of its
    periods. Only the second half of the time in which all are running is counted.
    """
    _check(tenants, cluster)
    network = FlowNetwork(cluster, message_s=message_s)
    jobs = [_inputs(number, tenant, cluster, network) for number, tenant in enumerate(tenants)]
    alone = [_steps_s([replace(job, start_s=0.0)], [_PERIODS])[0] for job in jobs]
    periods_s = [step_s * period_of(job.strategy) for step_s, job in zip(alone, jobs, strict=True)]
    # So that a job with short steps does not end before the others.
    longest_s = max(periods_s)
    counts = [round(_PERIODS * longest_s / time_s) if time_s else _PERIODS for time_s in periods_s]
    most = [max(_PERIODS, _MOST_STEPS // period_of(job.strategy)) for job in jobs]
    together = _steps_s(jobs, list(map(min, counts, most)))
    return [
        Shared(strategy=str(tenant.strategy), workload=tenant.workload.name, alone_s=alone_s, together_s=together_s)
        for tenant, alone_s, together_s in zip(tenants, alone, together, strict=True)
    ]


def _check(tenants: Sequence[Tenant], cluster: Cluster) -> None:
    if not tenants:
        raise UsageError("there is no job to simulate. Give at least one.")
    taken: dict[int, int] = {}
    for number, tenant in enumerate(tenants):
        if not tenant.devices:
            raise UsageError(f"job {number} has no device. Give each job at least one.")
        if not 0 <= tenant.start_s < _LATEST_S:
            raise UsageError(f"job {number}: start_s must be at least 0 and below {_LATEST_S:g}, got {tenant.start_s}.")
        for device in tenant.devices:
            if not 0 <= device < cluster.num_devices:
                raise UsageError(
                    f"job {number}: there is no device {device}; devices are numbered 0 to {cluster.num_devices - 1}."
                )
            if device in taken:
                raise UsageError(
                    f"device {device} is given to job {taken[device]} and to job {number}. Give it to one."
                )
            taken[device] = number


def _inputs(number: int, tenant: Tenant, cluster: Cluster, network: FlowNetwork) -> Inputs:
    asked, size = as_strategy(tenant.strategy), len(tenant.devices)
    hosts = hosts_of(tenant.devices, cluster)
    strategy = settled(asked, hosts, network, lambda: pair_rates(cluster, tenant.devices))
    if strategy.architecture.tells_hosts_apart() and hosts != hosts_of(range(size), cluster):
        raise UsageError(
            f"job {number}: {strategy.architecture} is simulated together with other jobs on whole hosts only, device "
            "after device. Give it such devices, or use algorithm=ring."
        )
    return Inputs(
        strategy=strategy,
        workload=tenant.workload,
        world_size=size,
        network=network,
        classes=(RankClass(size),),
        codec=codec_of(tenant.workload, asked),
        hosts=hosts,
        moment=Moment.steady(size),
        devices=np.array(tenant.devices, dtype=np.int64),
        start_s=tenant.start_s,
    )


def _steps_s(jobs: Sequence[Inputs], num_periods: Sequence[int]) -> list[float]:
    """The step time of each job if these run at the same time."""
    builder, drawings = GraphBuilder(), list[TaskGraph]()
    for job, count in zip(jobs, num_periods, strict=True):
        drawings.append(TaskGraph(job, builder))
        draw_steps(drawings[-1], candidates(job)[0], count * period_of(job.strategy))
    network = jobs[0].network
    assert isinstance(network, FlowNetwork)
    outcome = run(builder.build(network.fabric))
    ended_s = [outcome.end_s[[ends[0] for ends in task_graph.step_ends]] for task_graph in drawings]
    last_s = min(float(times_s[-1]) for times_s in ended_s)
    found: list[float] = []
    for job, times_s in zip(jobs, ended_s, strict=True):
        period = period_of(job.strategy)
        rate = float(pace(times_s[period - 1 :: period, None], last_s / 2, last_s)[0]) * period
        found.append(1 / rate if rate else 0.0)
    return found
