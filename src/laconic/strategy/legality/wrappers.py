"""Compression with itself: which wrappers fit, and where a residual or a momentum is kept."""

from __future__ import annotations

import dataclasses

from laconic.compression import Wrapper
from laconic.strategy.legality.combination import Parts, Refusal
from laconic.strategy.legality.wrapper_stacks import (
    in_words,
    moved_beneath,
    replaced,
    sends_directions,
    that_rounds_sums,
    with_a_route,
    with_sizes,
    with_usual_route,
    without,
)


def no_wrapper_twice(parts: Parts) -> Refusal | None:
    """The same wrapper twice would keep the same error twice."""
    seen: set[str] = set()
    for layer in parts.compression.layers():
        if isinstance(layer, Wrapper):
            if layer.name in seen:
                return Refusal(
                    f'compression: {layer.name} is applied twice in "{parts.compression}"',
                    dataclasses.replace(parts, compression=without(parts.compression, layer)),
                )
            seen.add(layer.name)
    return None


def a_wrapper_fits_what_it_wraps(parts: Parts) -> Refusal | None:
    """Some wrappers work only around certain compressors."""
    for layer in parts.compression.layers():
        if isinstance(layer, Wrapper) and not isinstance(layer.inner, layer.wraps):
            # Further inside, directly around a compressor it fits, or nowhere.
            around = next(
                (
                    inner
                    for inner in layer.layers()
                    if isinstance(inner, Wrapper) and isinstance(inner.inner, layer.wraps)
                ),
                None,
            )
            moved = (
                moved_beneath(parts.compression, layer, around)
                if around is not None
                else without(parts.compression, layer)
            )
            return Refusal(
                f'compression: {layer.name} does not fit around "{layer.inner}"; it wants {in_words(layer.wraps)}',
                dataclasses.replace(parts, compression=moved),
            )
    return None


def a_method_in_a_setting_fits(parts: Parts) -> Refusal | None:
    """A setting that holds a method accepts only one kind of method."""
    for layer in parts.compression.layers():
        for field in dataclasses.fields(layer):
            setting = layer.declared().get(field.name)
            held = getattr(layer, field.name)
            if setting is not None and setting.wants is not None and not isinstance(held, setting.wants):
                usual = dataclasses.replace(layer, **{field.name: field.default})
                wanted = in_words(setting.wants)
                return Refusal(
                    f'compression: {layer.name} cannot use "{held}" as {field.name}; it wants {wanted}',
                    dataclasses.replace(parts, compression=replaced(parts.compression, layer, usual)),
                )
    return None


def a_wrapper_needs_a_loss(parts: Parts) -> Refusal | None:
    """A wrapper that works on lost values has no effect on a lossless compressor."""
    for layer in parts.compression.layers():
        if isinstance(layer, Wrapper) and layer.needs_loss and layer.inner.traits.lossless:
            return Refusal(
                f'compression: {layer.name} has no effect on "{layer.inner}", which loses nothing',
                dataclasses.replace(parts, compression=without(parts.compression, layer)),
            )
    return None


def a_wrapper_needs_a_fair_loss(parts: Parts) -> Refusal | None:
    """A wrapper that relies on errors that cancel out needs an unbiased compressor."""
    for layer in parts.compression.layers():
        if isinstance(layer, Wrapper) and layer.needs_unbiased and not layer.inner.traits.unbiased:
            return Refusal(
                f'compression: {layer.name} needs an unbiased compressor, which "{layer.inner}" is not',
                dataclasses.replace(parts, compression=without(parts.compression, layer)),
            )
    return None


def a_wrapper_needs_sizes(parts: Parts) -> Refusal | None:
    """A wrapper that adds up what is decoded needs values with their size."""
    for layer in parts.compression.layers():
        direction = sends_directions(layer.inner) if isinstance(layer, Wrapper) and layer.needs_scale else None
        if direction is not None:
            return Refusal(
                f"compression: {layer.name} adds or subtracts what is decoded, and {direction.name} sends only "
                "directions, whose sums do not come near those of gradients",
                dataclasses.replace(parts, compression=replaced(parts.compression, layer, with_sizes(layer))),
            )
    return None


def estimates_need_sums_that_are_not_rounded(parts: Parts) -> Refusal | None:
    """An estimate that adds up what arrives would add up what sums have lost, too."""
    for layer in parts.compression.layers():
        if not isinstance(layer, Wrapper) or not layer.own_traits.estimates_all:
            continue
        for inner in layer.inner.layers():
            if not inner.own_traits.rounds_sums:
                continue
            held = that_rounds_sums(inner)
            named = next(iter(held.values()), inner)
            usual = {field.name: field.default for field in dataclasses.fields(inner) if field.name in held}
            nearest = (
                replaced(parts.compression, inner, dataclasses.replace(inner, **usual))
                if held
                else without(parts.compression, layer)
            )
            return Refusal(
                f'compression: {layer.name} adds up what arrives in all steps, and "{named}" forms sums in 16 bits: '
                "what these lose would never be made up for",
                dataclasses.replace(parts, compression=nearest),
            )
    return None


def a_wrapper_that_gathers_leaves_no_route(parts: Parts) -> Refusal | None:
    """Where a wrapper gathers payloads, a route has no effect."""
    outer: Wrapper | None = None
    for layer in parts.compression.layers():
        if outer is not None and (routed := with_a_route(layer)) is not None:
            return Refusal(
                f"compression: {routed.name}.route has no effect inside {outer.name}, which has payloads gathered",
                dataclasses.replace(parts, compression=replaced(parts.compression, layer, with_usual_route(layer))),
            )
        if isinstance(layer, Wrapper) and layer.gathers:
            outer = layer
    return None


def no_residual_twice(parts: Parts) -> Refusal | None:
    """Lost values must be sent later once, not twice."""
    keepers = [layer for layer in parts.compression.layers() if layer.own_traits.keeps_residual]
    if len(keepers) < 2:
        return None
    return Refusal(
        f"compression: {keepers[-1].name} sends later itself what it does not send now; {keepers[0].name} would send "
        "that twice",
        dataclasses.replace(parts, compression=without(parts.compression, keepers[0])),
    )


def no_momentum_twice(parts: Parts) -> Refusal | None:
    """A momentum of a momentum makes no sense."""
    builders = [layer for layer in parts.compression.layers() if layer.own_traits.accumulates]
    if len(builders) < 2:
        return None
    return Refusal(
        f"compression: {builders[-1].name} has momentum already; {builders[0].name} would add it again",
        dataclasses.replace(parts, compression=without(parts.compression, builders[0])),
    )


def residuals_are_kept_inside_momentum(parts: Parts) -> Refusal | None:
    """A residual is the input minus the sent values, so these must not hold more than the input."""
    layers = list(parts.compression.layers())
    for position, layer in enumerate(layers):
        beneath = next((inner for inner in layers[position + 1 :] if inner.own_traits.accumulates), None)
        if isinstance(layer, Wrapper) and layer.own_traits.keeps_residual and beneath is not None:
            moved = (
                moved_beneath(parts.compression, layer, beneath)
                if isinstance(beneath, Wrapper)
                else without(parts.compression, layer)
            )
            return Refusal(
                f"compression: {layer.name} outside {beneath.name} would take earlier gradients, which are not lost, "
                "for a loss",
                dataclasses.replace(parts, compression=moved),
            )
    return None


def no_residual_of_what_is_enlarged(parts: Parts) -> Refusal | None:
    """An error that may exceed the input would return in the residual, larger in every step."""
    for layer in parts.compression.layers():
        if isinstance(layer, Wrapper) and layer.own_traits.keeps_residual and layer.inner.traits.amplifies:
            return Refusal(
                f'compression: the residual of {layer.name} around "{layer.inner}" would grow without bound, because '
                "an error of that compressor may exceed its input",
                dataclasses.replace(parts, compression=without(parts.compression, layer)),
            )
    return None
