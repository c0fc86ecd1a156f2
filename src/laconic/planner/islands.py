"""Hosts as workers: FSDP2 shards the model inside each host, and the strategy works between hosts.

A host is one worker whose compute takes as long as a step of FSDP2 among its devices, on the links inside the host;
what it exchanges with other hosts leaves through the host's links as before, a shard from each device. So there are as
many replicas as hosts, which costs local steps less loss than one replica per device. In a script:

    mesh = init_device_mesh("cuda", (hosts, devices), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    laconic.attach(model, optimizer, strategy, process_group=mesh["replicate"])
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from laconic.planner.candidates import FSDP, candidates_between_islands
from laconic.planner.choice import Choice, Judge
from laconic.planner.question import Question
from laconic.prices.memory import Memory
from laconic.simulator import Simulation, simulate

_INSIDE = "inside a host"
"""The key of such simulations in a cache."""


@dataclass(frozen=True, kw_only=True)
class Islands(Question):
    """A question with hosts in place of devices."""

    devices: int
    """Devices of each host."""


def between_islands(question: Islands, drawn: dict[str, Simulation] | None = None) -> list[Choice]:
    """Predictions for strategies between hosts, with the memory of each device; `drawn`: see Judge."""
    judge, devices = Judge(question, drawn, among="hosts"), question.devices
    made = [judge.choice(strategy) for strategy in candidates_between_islands()]
    return [
        replace(
            choice,
            islands=True,
            memory=Memory(model=choice.memory.model // devices, strategy=choice.memory.strategy // devices),
        )
        for choice in made
        if not isinstance(choice, str)
    ]


def as_islands(question: Question, drawn: dict[str, Simulation] | None = None) -> Islands | None:
    """The question with hosts in place of devices; None where hosts have one device each, or there is one host."""
    setting = question.setting
    cluster = setting.cluster
    devices, hosts = cluster.devices_per_host, question.scale.hosts
    if devices == 1 or question.is_one_host or setting.workers != cluster.num_devices:
        return None
    one_host = replace(cluster, links=cluster.links[:1], speeds=cluster.speeds[:1], measured=None)
    drawn = {} if drawn is None else drawn
    found = simulate(FSDP, question.workload, one_host, like=drawn.get(_INSIDE))
    drawn.setdefault(_INSIDE, found)
    inside = found.prediction
    limits = question.limits
    memory_bytes = None if limits.memory_bytes is None else devices * limits.memory_bytes
    # The NICs of a host work in parallel for its devices, so together they are its link.
    links = tuple(replace(link, bandwidth_bps=link.bandwidth_bps * cluster.nics) for link in cluster.links)
    whole = replace(cluster, links=links, devices_per_host=1, inside=None, nics=1, measured=None)
    return Islands(
        workload=question.workload.scaled(compute_s=inside.step_s),
        setting=replace(setting, cluster=whole, workers=hosts),
        device=question.device,
        learns_text=question.learns_text,
        steps=question.steps,
        limits=replace(limits, memory_bytes=memory_bytes),
        devices=devices,
    )
