"""Several jobs on one fabric: each computes on devices of its own, and all share the links between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from laconic.cluster import Cluster
from laconic.core.moment import Moment
from laconic.errors import UsageError
from laconic.simulator.engine import GraphBuilder, run
from laconic.simulator.lowering.drawing import Drawing, Inputs, RankClass
from laconic.simulator.network.flow import FlowNetwork
from laconic.simulator.prediction import Shared
from laconic.simulator.simulation import draw_steps, first_plans, period_of
from laconic.strategy import Strategy, as_strategy
from laconic.workload import Workload

_PERIODS = 12


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """One job, and where it runs."""

    strategy: Strategy | str
    workload: Workload
    devices: Sequence[int]
    """The device of each rank; no device has two."""


def simulate_together(tenants: Sequence[Tenant], cluster: Cluster, *, message_s: float = 0.0) -> list[Shared]:
    """What a step of each job takes when all run at the same time, and when it has the fabric to itself.

    Jobs start together and run for a dozen of their own periods; counted is the second half, as far as all are running.
    """
    _check(tenants, cluster)
    together = _run(tenants, cluster, message_s)
    alone = [_run([tenant], cluster, message_s)[0] for tenant in tenants]
    return [
        Shared(strategy=str(tenant.strategy), workload=tenant.workload.name, alone_s=alone_s, together_s=together_s)
        for tenant, alone_s, together_s in zip(tenants, alone, together, strict=True)
    ]


def _check(tenants: Sequence[Tenant], cluster: Cluster) -> None:
    taken: dict[int, int] = {}
    for number, tenant in enumerate(tenants):
        if not tenant.devices:
            raise UsageError(f"job {number} has no device. Give each job at least one.")
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


def _run(tenants: Sequence[Tenant], cluster: Cluster, message_s: float) -> list[float]:
    network, builder = FlowNetwork(cluster, message_s=message_s), GraphBuilder()
    drawings: list[tuple[Drawing, int]] = []
    for tenant in tenants:
        strategy, size = as_strategy(tenant.strategy), len(tenant.devices)
        inputs = Inputs(
            strategy=strategy,
            workload=tenant.workload,
            world_size=size,
            network=network,
            classes=(RankClass(size),),
            codec=None,
            moment=Moment.steady(size),
            devices=np.array(tenant.devices, dtype=np.int64),
        )
        drawing = Drawing(inputs, builder)
        period = period_of(strategy)
        draw_steps(drawing, first_plans(inputs), _PERIODS * period)
        drawings.append((drawing, period))
    outcome = run(builder.build(network.fabric))
    ended = [outcome.end_s[[ends[0] for ends in drawing.step_ends]] for drawing, _ in drawings]
    until_s = min(float(times[-1]) for times in ended)
    found: list[float] = []
    for times, (_, period) in zip(ended, drawings, strict=True):
        within = times[times <= until_s * (1 + 1e-12)][period - 1 :: period]
        half = len(within) // 2
        found.append(
            float(within[-1] - within[half]) / ((len(within) - 1 - half) * period) if half else float(times[0])
        )
    return found
