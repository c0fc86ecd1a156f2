"""Where each rank holds a shard of every parameter: what is averaged, how it is read, and in which parts it travels."""

from __future__ import annotations

import dataclasses

from laconic.compression import Int8
from laconic.scheduling import Fusion
from laconic.strategy.legality.combination import Parts, Refusal
from laconic.synchronization import Bsp


def shards_are_averaged_in_every_step(parts: Parts) -> Refusal | None:
    """No rank has a model of its own that it could train alone."""
    when, whom = parts.synchronization, parts.architecture
    whole = when.remembers_unsent or when.beginning or when.lazy
    if not whom.holds_shards or (when.quantity == "gradient" and when.barrier and not whole):
        return None
    return Refusal(
        f"synchronization: {when.name} needs a whole model on each rank, and with {whom.name} each has a shard; "
        "between groups of shards it works with all_reduce",
        dataclasses.replace(parts, synchronization=Bsp()),
    )


def owners_read_what_is_sent(parts: Parts) -> Refusal | None:
    """The owner of a shard decodes each rank's payload by itself, piece by piece."""
    whom, what = parts.architecture, parts.compression
    traits = what.traits
    fits = traits.decodes_alone and traits.exact_bytes and not traits.needs_whole_tensors
    if not whom.holds_shards or fits:
        return None
    return Refusal(
        f"compression: with {whom.name} the owner of a shard decodes each payload by itself, piece by piece, and knows "
        f'its length in advance, which "{what}" does not allow',
        dataclasses.replace(parts, compression=Int8()),
    )


def parts_are_the_models_own(parts: Parts) -> Refusal | None:
    """fully_shard() decides which parameters are exchanged together, and when."""
    whom, order = parts.architecture, parts.scheduling
    if not whom.holds_shards or order == Fusion():
        return None
    return Refusal(
        f"scheduling: {order} has no effect with {whom.name}: each module that fully_shard() was called on is "
        "exchanged as one",
        dataclasses.replace(parts, scheduling=Fusion()),
    )
