"""Collectives of a plan outside the measured range: numbers of GPUs, and sizes."""

from __future__ import annotations

from collections.abc import Iterator

from laconic.simulator.parallel.layer import Slice
from laconic.simulator.parallel.measured_collectives import measured_costs
from laconic.simulator.parallel.plan import Plan
from laconic.simulator.parallel.shares import stage_layers, stage_parameters
from laconic.simulator.parallel.system import Job, System
from laconic.simulator.parallel.traffic import Groups, layer_traffic


def extrapolations(job: Job, plan: Plan, system: System) -> list[str]:
    """Warnings in sentences; none where formulas are used."""
    name = system.fabric.measured
    if not name:
        return []
    found: dict[str, None] = {}
    for operation, nbytes, gpus in _inside_a_node(job, plan, system):
        found.update(dict.fromkeys(measured_costs(name).estimate(operation, nbytes, gpus).warnings))
    return list(found)


def _inside_a_node(job: Job, plan: Plan, system: System) -> Iterator[tuple[str, float, int]]:
    """Operations among the GPUs of one node, with their bytes."""
    groups, software = Groups.of(plan, system.fabric), system.software
    here = Slice(job.model, plan, job.sequence, software)
    for mixture, count in zip((False, True), stage_layers(job.model, plan, 0), strict=True):
        if not count:
            continue
        traffic = layer_traffic(here, mixture=mixture)
        if groups.tensor.nodes == 1 < groups.tensor.size:
            for operation, nbytes in (*traffic.tensor_forward, *traffic.tensor_backward):
                yield operation, nbytes, groups.tensor.size
        if groups.context.nodes == 1 < groups.context.size:
            yield "all_gather", traffic.context_bytes, groups.context.size
    if groups.data.nodes == 1 < groups.data.size:
        gradients = software.gradient_bytes * stage_parameters(job.model, plan, 0).total
        yield ("reduce_scatter" if plan.zero else "all_reduce"), gradients, groups.data.size
