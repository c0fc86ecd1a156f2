"""How sums are formed with what they are sums of."""

from __future__ import annotations

import dataclasses

from laconic.architecture import AllReduce
from laconic.compression import Compressor
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.strategy.legality.combination import Parts, Refusal

_SAMPLE = Bucket((TensorSpec("weight", (64, 64)), TensorSpec("bias", (64,))))
"""What models have: some methods treat matrices and vectors differently."""


def sums_are_compressed(parts: Parts) -> Refusal | None:
    """What compresses the sum of a host needs something that compresses, and nobody who must know his part of it."""
    when, whom, what = parts.synchronization, parts.architecture, parts.compression
    if not whom.compresses_sums():
        return None
    nearest = dataclasses.replace(parts, architecture=AllReduce(algorithm="hierarchical"))
    if what.traits.lossless:
        return Refusal(f'architecture: {whom} has no effect with "{what}", which compresses nothing', nearest)
    if when.remembers_unsent:
        return Refusal(
            f"synchronization: {when.name} keeps what of its own was not sent, and with {whom} that is lost in the sum "
            "of a host",
            nearest,
        )
    if parts.scheduling.halves:
        return Refusal(
            f"scheduling: {parts.scheduling.name} forms sums in two halves, and with {whom} they are compressed in "
            "between",
            nearest,
        )
    return None


def sums_are_formed_of_something(parts: Parts) -> Refusal | None:
    """How a sum is formed matters only where there is one."""
    whom, what = parts.architecture, parts.compression
    if not whom.forms_sums() or whom.compresses_sums() or _ever_sums(what):
        return None
    return Refusal(
        f'architecture: {whom} has no effect with "{what}", whose payloads are gathered and never added up on the way',
        dataclasses.replace(parts, architecture=AllReduce()),
    )


def _ever_sums(compression: Compressor) -> bool:
    """Whether some round of an exchange is a sum: at the start of training, or later."""
    return any(
        round.kind == "sum"
        for moment in (Moment(world_size=4), Moment.steady(4))
        for round in compression.rounds(_SAMPLE, moment)
    )
