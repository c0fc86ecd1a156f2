"""Compression with architecture and synchronization: who decodes a payload, its route, and values that are not sent."""

from __future__ import annotations

import dataclasses

from laconic.architecture import AllReduce, Choco, PowerGossip
from laconic.compression import Compressor, DctTopK, ErrorFeedback, NoCompression, PowerSgd, TopK
from laconic.strategy.legality.combination import Parts, Refusal
from laconic.strategy.legality.wrapper_stacks import (
    replaced,
    sends_directions,
    with_a_route,
    with_sizes,
    with_usual_route,
    without,
)


def payloads_take_a_route(parts: Parts) -> Refusal | None:
    """Where payloads are passed on one by one, a route has no effect."""
    whom = parts.architecture
    if whom.scope == "everyone" and not whom.has_servers and not whom.holds_shards:
        return None
    for layer in parts.compression.layers():
        if (routed := with_a_route(layer)) is not None:
            return Refusal(
                f"compression: {routed.name}.route has no effect with {parts.architecture.name}, which passes payloads "
                "on one by one",
                dataclasses.replace(parts, compression=replaced(parts.compression, layer, with_usual_route(layer))),
            )
    return None


def servers_read_what_is_sent(parts: Parts) -> Refusal | None:
    """A server needs payloads that it can decode alone, or rounds that are sums."""
    when, whom, what = parts.synchronization, parts.architecture, parts.compression
    if not whom.has_servers or what.traits.decodes_alone or (when.barrier and what.traits.sums_only):
        return None
    return Refusal(
        f"compression: a server of {whom.name} with {when.name} must decode each payload by itself, which it cannot "
        f'with "{what}"',
        dataclasses.replace(parts, compression=ErrorFeedback(TopK())),
    )


def a_step_is_made_of_factors(parts: Parts) -> Refusal | None:
    """A rule that makes a step of two thin matrices needs a compressor that hands them over in every exchange."""
    when, what = parts.synchronization, parts.compression
    if not when.needs_factors or what.traits.gives_factors:
        return None
    base = _base(what)
    return Refusal(
        f'compression: {when.name} makes its steps from two thin matrices for each parameter, and "{what}" does not '
        f"give {'them in every step' if base.traits.gives_factors else 'any'}",
        dataclasses.replace(parts, compression=base if base.traits.gives_factors else PowerSgd()),
    )


def what_is_not_sent_is_remembered_once(parts: Parts) -> Refusal | None:
    """A rule or an architecture that keeps unsent values needs a lossy compressor without a residual."""
    when, whom, what = parts.synchronization, parts.architecture, parts.compression
    owner = when if when.remembers_unsent else whom if whom.compensates else None
    if owner is None:
        return None
    keeper = next(
        (layer for layer in what.layers() if layer.own_traits.keeps_residual or layer.own_traits.accumulates), None
    )
    if keeper is not None:
        return Refusal(
            f"compression: {keeper.name} would keep what is not sent a second time; {owner.name} does that itself",
            dataclasses.replace(parts, compression=without(what, keeper)),
        )
    if what.traits.amplifies:
        return Refusal(
            f'compression: the error of "{what}" may exceed its input; {owner.name} would keep the difference, which '
            "would grow without bound",
            dataclasses.replace(parts, compression=TopK()),
        )
    direction = sends_directions(what)
    if when.remembers_unsent and direction is not None:
        return Refusal(
            f"compression: {direction.name} sends only directions, so what is left of a momentum after "
            f"sending cannot be kept by {owner.name}",
            dataclasses.replace(parts, compression=with_sizes(what)),
        )
    if when.remembers_unsent and what.traits.lossless:
        return Refusal(
            f'{owner.axis}: {owner.name} keeps what is not sent, and "{what}" sends everything',
            dataclasses.replace(parts, compression=DctTopK()),
        )
    return None


def neighbours_need_the_whole(parts: Parts) -> Refusal | None:
    """Values lost from parameters would be missing for good, unless public copies are kept."""
    when, whom, what = parts.synchronization, parts.architecture, parts.compression
    if whom.scope == "everyone" or whom.compensates or whom.adds_differences or what.traits.lossless:
        return None
    if when.among_neighbours:
        return Refusal(
            f'compression: {when.name} exchanges parameters with a neighbour, and what "{what}" loses of these would '
            "never be sent",
            dataclasses.replace(parts, compression=NoCompression()),
        )
    lost = f'architecture: {whom.name} mixes parameters, and what "{what}" loses of these would never be sent'
    if when.barrier and _base(what).traits.linear:
        return Refusal(
            f"{lost}; power_gossip sends differences by it", dataclasses.replace(parts, architecture=PowerGossip())
        )
    return Refusal(f"{lost}; choco keeps public copies for that", dataclasses.replace(parts, architecture=Choco()))


def differences_need_a_linear_compressor(parts: Parts) -> Refusal | None:
    """Neighbours compress their own parameters and subtract, which needs a linear compressor."""
    whom, what = parts.architecture, parts.compression
    if not whom.adds_differences or what.traits.linear or what == NoCompression():
        return None
    base = _base(what)
    if base != what and base.traits.linear:
        outer = next(what.layers())
        return Refusal(
            f"compression: {outer.name} has no place with {whom.name}, where what is lost of a difference is still "
            "there in the next round",
            dataclasses.replace(parts, compression=base),
        )
    return Refusal(
        f'compression: {whom.name} sends differences of parameters, for which "{what}" would have to be linear and to '
        "form sums only; choco keeps public copies instead",
        dataclasses.replace(parts, architecture=Choco()),
    )


def _base(compression: Compressor) -> Compressor:
    """The compressor inside all wrappers."""
    *_, base = compression.layers()
    return base


def a_payload_is_read_by_itself(parts: Parts) -> Refusal | None:
    """Neighbours decode each payload by itself."""
    traits = parts.compression.traits
    if not parts.architecture.compensates or (traits.decodes_alone and traits.exact_bytes):
        return None
    return Refusal(
        f"compression: with {parts.architecture.name} each payload is decoded by itself and has a known length, which "
        f'"{parts.compression}" does not allow',
        dataclasses.replace(parts, compression=TopK()),
    )


def a_change_is_compared_with_what_arrived(parts: Parts) -> Refusal | None:
    """A rule that skips gradients that have hardly changed compares them with the mean that arrived last."""
    when, direction = parts.synchronization, sends_directions(parts.compression)
    if not when.lazy or direction is None:
        return None
    return Refusal(
        f"compression: {when.name} compares gradients with the last mean, and {direction.name} sends only directions",
        dataclasses.replace(parts, compression=with_sizes(parts.compression)),
    )


def a_mean_that_is_used_again_holds_nothing_else(parts: Parts) -> Refusal | None:
    """A rule that applies one mean in several steps would apply a residual in it as often."""
    when, what = parts.synchronization, parts.compression
    if not when.lazy:
        return None
    for layer in what.layers():
        if layer.own_traits.keeps_residual or layer.own_traits.accumulates:
            return Refusal(
                f"compression: {layer.name} adds values of earlier steps to what it sends, and {when.name} may apply a "
                "mean in several steps",
                dataclasses.replace(parts, compression=without(what, layer)),
            )
    return None


def differences_that_add_up_lose_nothing(parts: Parts) -> Refusal | None:
    """A rule that adds up the differences between means and own changes would add up what compression loses."""
    when, what = parts.synchronization, parts.compression
    if not when.adds_up_differences or what.traits.lossless:
        return None
    # A method that estimates sends what it leaves out only when changes are steady.
    if what.traits.keeps_residual and not any(layer.own_traits.estimates_all for layer in what.layers()):
        return None
    return Refusal(
        f"compression: {when.name} adds up the differences between mean changes and those of its replica, and what "
        f'"{what}" loses would be part of them for good unless error_feedback sends it later',
        dataclasses.replace(parts, compression=NoCompression()),
    )


def a_momentum_is_applied_as_it_arrives(parts: Parts) -> Refusal | None:
    """A momentum must be averaged over all ranks, with its size, and belong to one step."""
    when, whom = parts.synchronization, parts.architecture
    if when.needs_adam and whom.has_servers:
        return Refusal(
            f"architecture: {when.name} averages moments among the workers, and {whom.name} does not know of them",
            dataclasses.replace(parts, architecture=AllReduce()),
        )
    if when.quantity != "momentum":
        return None
    direction = sends_directions(parts.compression)
    if direction is not None:
        return Refusal(
            f"compression: {direction.name} sends only directions, which are no momentum",
            dataclasses.replace(parts, compression=with_sizes(parts.compression)),
        )
    for layer in parts.compression.layers():
        if layer.own_traits.accumulates:
            return Refusal(
                f"compression: {layer.name} adds up several steps itself, and {when.name} exchanges a momentum already",
                dataclasses.replace(parts, compression=without(parts.compression, layer)),
            )
        if layer.own_traits.warms_up and when.beginning:
            return Refusal(
                f"compression: {layer.name} begins with another compressor, as {when.name} does by itself",
                dataclasses.replace(parts, compression=without(parts.compression, layer)),
            )
    return None


def parameters_are_moved_by_what_arrives(parts: Parts) -> Refusal | None:
    """A change of parameters must arrive with its size, and once."""
    if parts.synchronization.quantity != "change" and parts.architecture.scope == "everyone":
        return None
    direction = sends_directions(parts.compression)
    if direction is not None:
        return Refusal(
            f"compression: {direction.name} sends only directions, by which no parameter can be moved",
            dataclasses.replace(parts, compression=with_sizes(parts.compression)),
        )
    for layer in parts.compression.layers():
        if layer.own_traits.accumulates:
            return Refusal(
                f"compression: {layer.name} adds up gradients of several steps, but here parameters are exchanged",
                dataclasses.replace(parts, compression=without(parts.compression, layer)),
            )
    return None
