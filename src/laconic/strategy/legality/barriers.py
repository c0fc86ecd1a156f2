"""Synchronization with architecture: which workers wait for each other, and which steps must be known."""

from __future__ import annotations

import dataclasses

from laconic.architecture import AllReduce, Choco, Gossip, ParameterServer
from laconic.compression import NoCompression
from laconic.strategy.legality.combination import Parts, Refusal

_SEVERAL = 2
"""A number of workers at which an architecture with one server for each of them has several servers."""


def without_a_barrier(parts: Parts) -> Refusal | None:
    """Training without a barrier needs partners that answer at any time; a staleness bound also needs clocks."""
    when, whom = parts.synchronization, parts.architecture
    if when.barrier:
        return None
    if not whom.asynchronous:
        return Refusal(
            f"synchronization: {when.name} does not wait for other workers, but {whom.name} needs all of them at once",
            dataclasses.replace(parts, architecture=ParameterServer()),
        )
    if when.quantity == "change" and not whom.has_servers:
        return Refusal(
            f"synchronization: {when.name} needs servers, which make its outer steps, and {whom.name} has none",
            dataclasses.replace(parts, architecture=ParameterServer()),
        )
    if when.needs_clocks and not whom.keeps_clocks:
        return Refusal(
            f"synchronization: {when.name} needs the step of every worker, which {whom.name} does not keep",
            dataclasses.replace(parts, architecture=ParameterServer()),
        )
    if not whom.has_servers and not whom.meets_the_same():
        return Refusal(
            f"architecture: {whom} changes neighbours with every mixing step, which needs a barrier",
            dataclasses.replace(parts, architecture=Gossip()),
        )
    if whom.compensates and whom.copy_rate(parts.compression.traits) is None:
        return Refusal(
            f"architecture: {whom.name} corrects the losses of compression in mixing steps of all replicas, and "
            "declares no copy_rate for pairs without a barrier",
            dataclasses.replace(parts, architecture=Choco()),
        )
    unused = next((key for key in when.changed_settings() if key in when.for_servers), None)
    if unused is not None and not whom.has_servers:
        return Refusal(
            f"synchronization: {when.name}.{unused} has no effect with {whom.name}, which has no servers",
            dataclasses.replace(parts, synchronization=type(when)()),
        )
    return None


def one_server_decides(parts: Parts) -> Refusal | None:
    """Which gradients of a step came first is decided by one server, which must receive all of them."""
    when, whom = parts.synchronization, parts.architecture
    if not when.takes_first or (whom.servers is not None and whom.servers.num_servers(_SEVERAL) == 1):
        return None
    has = "has no servers" if whom.servers is None else "has several, each with a part of the model"
    return Refusal(
        f"synchronization: {when.name} needs one server that receives the gradients of all workers and decides which "
        f"came first, and {whom} {has}",
        dataclasses.replace(parts, architecture=ParameterServer(shards=1)),
    )


def an_outer_step_with_neighbours(parts: Parts) -> Refusal | None:
    """A rule that makes its outer step with a few neighbours needs an architecture that averages whatever it sends."""
    when, whom = parts.synchronization, parts.architecture
    if not when.among_neighbours or whom.mixes_anything:
        return None
    why = "takes the mean over all" if whom.scope == "everyone" else "mixes parameters in a way of its own"
    return Refusal(
        f"synchronization: {when.name} makes its outer step with a few neighbours at a time, and {whom.name} {why}",
        dataclasses.replace(parts, architecture=Gossip(topology="random_pairs")),
    )


def ranks_can_be_weighted(parts: Parts) -> Refusal | None:
    """Ranks that stop at a deadline are weighted by their steps, in a sum over all of them."""
    when, whom, what = parts.synchronization, parts.architecture, parts.compression
    if when.deadline_s is None:
        return None
    if whom.scope != "everyone" or whom.has_servers:
        return Refusal(
            f"synchronization: {when} weights ranks by the steps they have made, and {whom.name} does not form one sum "
            "over all ranks",
            dataclasses.replace(parts, architecture=AllReduce()),
        )
    if not what.traits.keeps_scale:
        return Refusal(
            f'synchronization: {when} weights ranks by the steps they have made, and what "{what}" sends does not '
            "depend on a weight",
            dataclasses.replace(parts, compression=NoCompression()),
        )
    return None


def a_round_reaches_everyone(parts: Parts) -> Refusal | None:
    """Some rules work on the mean over all replicas."""
    when, whom = parts.synchronization, parts.architecture
    if not when.needs_everyone or whom.scope == "everyone":
        return None
    return Refusal(
        f"synchronization: {when.name} works on the mean over all replicas, and with {whom.name} each replica has "
        "only the mean over its neighbours",
        dataclasses.replace(parts, architecture=AllReduce()),
    )
