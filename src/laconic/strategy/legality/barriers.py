"""When with whom: who waits for whom, and who has to know of whom."""

from __future__ import annotations

import dataclasses

from laconic.architecture import AllReduce, Choco, Gossip, ParameterServer
from laconic.strategy.legality.combination import Parts, Refusal


def without_a_barrier(parts: Parts) -> Refusal | None:
    """Going on without waiting needs somebody who answers at any time, and waiting for some needs clocks."""
    when, whom = parts.synchronization, parts.architecture
    if when.barrier:
        return None
    if not whom.asynchronous:
        return Refusal(
            f"synchronization: {when.name} waits for nobody, but in {whom.name} everybody meets everybody",
            dataclasses.replace(parts, architecture=ParameterServer()),
        )
    if when.needs_clocks and not whom.keeps_clocks:
        return Refusal(
            f"synchronization: {when.name} needs to know how far every worker is, and nobody does in {whom.name}",
            dataclasses.replace(parts, architecture=ParameterServer()),
        )
    if not whom.has_servers and not whom.meets_the_same():
        return Refusal(
            f"architecture: {whom} has other neighbours in every round, and without a barrier there are no rounds",
            dataclasses.replace(parts, architecture=Gossip()),
        )
    if whom.compensates and whom.copy_rate is None:
        return Refusal(
            f"architecture: {whom.name} makes up in rounds of all for what compression loses, and does not say how "
            "pairs do that without a barrier (copy_rate)",
            dataclasses.replace(parts, architecture=Choco()),
        )
    unused = next((key for key in when.changed_settings() if key in when.for_servers), None)
    if unused is not None and not whom.has_servers:
        return Refusal(
            f"synchronization: {when.name}.{unused} has no effect with {whom.name}, which has no servers",
            dataclasses.replace(parts, synchronization=type(when)()),
        )
    return None


def a_round_reaches_everyone(parts: Parts) -> Refusal | None:
    """Some rules work on the mean over all replicas."""
    when, whom = parts.synchronization, parts.architecture
    if not when.needs_everyone or whom.scope == "everyone":
        return None
    return Refusal(
        f"synchronization: {when.name} works on the mean over all replicas, and with {whom.name} each has only that "
        "over its neighbours",
        dataclasses.replace(parts, architecture=AllReduce()),
    )
