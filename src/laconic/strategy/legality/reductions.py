"""Architecture with compression: how sums are formed, and of which payloads."""

from __future__ import annotations

import dataclasses

from laconic.architecture import AllReduce
from laconic.compression import COMPRESSORS, Compressor, IntSgd
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.scheduling import Fusion
from laconic.strategy.legality.combination import SPLITS, Parts, Refusal

_SAMPLE = Bucket((TensorSpec("weight", (64, 64)), TensorSpec("bias", (64,))))
"""A matrix and a vector, as models have: some methods treat them differently."""


def sums_are_compressed(parts: Parts) -> Refusal | None:
    """Compressing a host's sum needs a lossy compressor, and no rule that keeps a rank's own unsent values."""
    when, whom, what = parts.synchronization, parts.architecture, parts.compression
    if not whom.compresses_sums():
        return None
    nearest = dataclasses.replace(parts, architecture=AllReduce(algorithm="hierarchical"))
    if what.traits.lossless:
        return Refusal(f'architecture: {whom} has no effect with "{what}", which compresses nothing', nearest)
    if when.remembers_unsent:
        return Refusal(
            f"synchronization: {when.name} keeps on each rank what that rank has not sent, which cannot be known where "
            f"{whom} compresses the sum of a host",
            nearest,
        )
    if parts.scheduling.decoupled:
        return Refusal(
            f"scheduling: {parts.scheduling.name} {SPLITS}, and with {whom} sums are compressed in between",
            nearest,
        )
    return None


def aggregators_only_add(parts: Parts) -> Refusal | None:
    """An aggregator on the network path adds up frames, cannot decode payloads, and returns the whole sum at once."""
    whom, what = parts.architecture, parts.compression
    if not whom.adds_only:
        return None
    if not (what.traits.sums_only or what.traits.payloads_add_up):
        return Refusal(
            f'compression: {whom.name} adds up integers on the way, and what "{what}" sends cannot be added up',
            dataclasses.replace(parts, compression=IntSgd()),
        )
    if parts.scheduling.decoupled:
        return Refusal(
            f"scheduling: {parts.scheduling.name} {SPLITS}, and an aggregator of {whom.name} returns the whole sum",
            dataclasses.replace(parts, scheduling=Fusion()),
        )
    return None


def what_may_be_missing_adds_up(parts: Parts) -> Refusal | None:
    """Where frames may be lost, payloads must add up, and the method must tolerate any missing value."""
    when, whom, what, order = parts.synchronization, parts.architecture, parts.compression, parts.scheduling
    if whom.loss_bound is None:
        return None
    elsewhere = dataclasses.replace(parts, architecture=AllReduce())
    if not what.traits.payloads_add_up:
        return Refusal(
            f'compression: {whom.name} leaves lost frames out of a mean of values, and what "{what}" sends cannot '
            "simply be added up",
            elsewhere,
        )
    if not what.traits.sends_every_value:
        return Refusal(
            f'compression: {whom.name} spreads loss over all values, and "{what}" does not send them all in one sum',
            elsewhere,
        )
    if when.beginning and not _by_name(when.beginning).traits.payloads_add_up:
        return Refusal(
            f"synchronization: {when.name} sends gradients by {when.beginning} at first, which cannot simply be added "
            f"up; {whom.name} leaves lost frames out of a mean of values",
            elsewhere,
        )
    if when.moments:
        return Refusal(
            f"synchronization: {when.name} averages moments of the optimizer, which lost frames of {whom.name} could "
            "make negative",
            elsewhere,
        )
    if order.decoupled:
        return Refusal(
            f"scheduling: {order.name} {SPLITS}, and an owner of {whom.name} sends the means at once",
            dataclasses.replace(parts, scheduling=Fusion()),
        )
    return None


def sums_are_formed_of_something(parts: Parts) -> Refusal | None:
    """The way in which sums are formed has no effect where no round is a sum."""
    whom, what = parts.architecture, parts.compression
    if not whom.forms_sums() or whom.compresses_sums() or _ever_sums(what):
        return None
    return Refusal(
        f'architecture: {whom} has no effect with "{what}", whose payloads are gathered and never added up on the way',
        dataclasses.replace(parts, architecture=AllReduce()),
    )


def _by_name(name: str) -> Compressor:
    """A compressor with its defaults."""
    return next(kind for kind in COMPRESSORS if kind.name == name)()


def _ever_sums(compression: Compressor) -> bool:
    """Whether some round of an exchange is a sum: at the start of training, or later."""
    return any(
        round.kind == "sum"
        for moment in (Moment(world_size=4), Moment.steady(4))
        for round in compression.rounds(_SAMPLE, moment)
    )
