"""What with whom: who has to read a payload, by which way it comes, and what becomes of what is not in it."""

from __future__ import annotations

import dataclasses

from laconic.architecture import AllReduce, Choco
from laconic.compression import Compressor, DctTopK, EfSignSgd, ErrorFeedback, Packed, TopK
from laconic.strategy.legality.combination import Parts, Refusal
from laconic.strategy.legality.wrapper_stacks import replaced, without


def payloads_take_a_route(parts: Parts) -> Refusal | None:
    """Where each payload is read by itself there is one way for it to go."""
    whom = parts.architecture
    if whom.scope == "everyone" and not whom.has_servers and not whom.holds_shards:
        return None
    for layer in parts.compression.layers():
        if isinstance(layer, Packed) and "route" in layer.changed_settings():
            usual = str(next(field.default for field in dataclasses.fields(layer) if field.name == "route"))
            return Refusal(
                f"compression: {layer.name}.route has no effect with {parts.architecture.name}, which passes payloads "
                "on one by one",
                dataclasses.replace(
                    parts, compression=replaced(parts.compression, layer, dataclasses.replace(layer, route=usual))
                ),
            )
    return None


def servers_read_what_is_sent(parts: Parts) -> Refusal | None:
    """A server adds up what it can decode by itself, or plain sums."""
    when, whom, what = parts.synchronization, parts.architecture, parts.compression
    if not whom.has_servers or what.traits.decodes_alone or (when.barrier and what.traits.sums_only):
        return None
    return Refusal(
        f"compression: a server of {whom.name} with {when.name} must decode each payload by itself, which it cannot "
        f'with "{what}"',
        dataclasses.replace(parts, compression=ErrorFeedback(TopK())),
    )


def what_is_not_sent_is_remembered_once(parts: Parts) -> Refusal | None:
    """A rule or an architecture that keeps what was not sent wants a compressor that loses something and forgets it."""
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
            f'compression: what "{what}" sends is enlarged to be right on average; {owner.name} would keep the '
            "difference, and it would grow for ever",
            dataclasses.replace(parts, compression=TopK()),
        )
    direction = next((layer for layer in what.layers() if not layer.own_traits.keeps_scale), None)
    if when.remembers_unsent and direction is not None:
        return Refusal(
            f"compression: {direction.name} sends directions without a size, so what is left of a momentum after "
            f"sending cannot be kept by {owner.name}",
            dataclasses.replace(parts, compression=replaced(what, direction, EfSignSgd())),
        )
    if when.remembers_unsent and what.traits.lossless:
        return Refusal(
            f'{owner.axis}: {owner.name} keeps what is not sent, and "{what}" sends everything',
            dataclasses.replace(parts, compression=DctTopK()),
        )
    return None


def neighbours_need_the_whole(parts: Parts) -> Refusal | None:
    """What was lost of parameters would be missing for good, unless public copies are kept."""
    if parts.architecture.scope == "everyone" or parts.architecture.compensates or parts.compression.traits.lossless:
        return None
    return Refusal(
        f'architecture: {parts.architecture.name} mixes parameters, and what "{parts.compression}" loses of these '
        "would never be sent; choco keeps public copies for that",
        dataclasses.replace(parts, architecture=Choco()),
    )


def a_payload_is_read_by_itself(parts: Parts) -> Refusal | None:
    """Neighbours decode what each of them sends, one at a time."""
    traits = parts.compression.traits
    if not parts.architecture.compensates or (traits.decodes_alone and traits.exact_bytes):
        return None
    return Refusal(
        f"compression: with {parts.architecture.name} each payload is decoded by itself and has a known length, which "
        f'that of "{parts.compression}" is not',
        dataclasses.replace(parts, compression=TopK()),
    )


def a_momentum_is_applied_as_it_arrives(parts: Parts) -> Refusal | None:
    """What takes the place of the optimizer's momentum must come from all, with its size, and be one step's."""
    when, whom = parts.synchronization, parts.architecture
    if when.quantity != "momentum":
        return None
    if whom.has_servers:
        return Refusal(
            f"architecture: {when.name} averages momentum among the workers, and {whom.name} does not know of it",
            dataclasses.replace(parts, architecture=AllReduce()),
        )
    for layer in parts.compression.layers():
        if layer.own_traits.accumulates:
            return Refusal(
                f"compression: {layer.name} adds up several steps itself, and {when.name} exchanges a momentum already",
                dataclasses.replace(parts, compression=without(parts.compression, layer)),
            )
        if not layer.own_traits.keeps_scale:
            return Refusal(
                f"compression: {layer.name} sends directions without a size, which are no momentum",
                dataclasses.replace(parts, compression=replaced(parts.compression, layer, EfSignSgd())),
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
    for layer in parts.compression.layers():
        for key, setting in layer.declared().items():
            held = getattr(layer, key)
            if setting.kind == "method" and isinstance(held, Compressor) and not held.traits.keeps_scale:
                usual = dataclasses.replace(layer, **{key: type(layer).__dataclass_fields__[key].default})
                return Refusal(
                    f"compression: {held.name} sends directions without a size, by which no parameter can be moved",
                    dataclasses.replace(parts, compression=replaced(parts.compression, layer, usual)),
                )
        if not layer.own_traits.keeps_scale:
            return Refusal(
                f"compression: {layer.name} sends directions without a size, by which no parameter can be moved",
                dataclasses.replace(parts, compression=replaced(parts.compression, layer, EfSignSgd())),
            )
        if layer.own_traits.accumulates:
            return Refusal(
                f"compression: {layer.name} adds up gradients of several steps, but here parameters are exchanged",
                dataclasses.replace(parts, compression=without(parts.compression, layer)),
            )
    return None
