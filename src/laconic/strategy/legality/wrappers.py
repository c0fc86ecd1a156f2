"""Compression with itself: what may wrap what, and what of a loss or of a momentum is kept where."""

from __future__ import annotations

import dataclasses

from laconic.compression import Wrapper
from laconic.strategy.legality.combination import Parts, Refusal
from laconic.strategy.legality.wrapper_stacks import in_words, moved_beneath, replaced, without


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
    """Some wrappers reach into what they wrap."""
    for layer in parts.compression.layers():
        if isinstance(layer, Wrapper) and not isinstance(layer.inner, layer.wraps):
            # Further in, directly around what it fits on, or nowhere.
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
    """A setting that holds a method works with one kind of methods."""
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
    """A wrapper that works on what is lost has no effect where nothing is."""
    for layer in parts.compression.layers():
        if isinstance(layer, Wrapper) and layer.needs_loss and layer.inner.traits.lossless:
            return Refusal(
                f'compression: {layer.name} has no effect on "{layer.inner}", which loses nothing',
                dataclasses.replace(parts, compression=without(parts.compression, layer)),
            )
    return None


def no_residual_twice(parts: Parts) -> Refusal | None:
    """What is lost must be sent later once, not twice."""
    keepers = [layer for layer in parts.compression.layers() if layer.own_traits.keeps_residual]
    if len(keepers) < 2:
        return None
    return Refusal(
        f"compression: {keepers[-1].name} sends later itself what it does not send now; {keepers[0].name} would send "
        "that twice",
        dataclasses.replace(parts, compression=without(parts.compression, keepers[0])),
    )


def no_momentum_twice(parts: Parts) -> Refusal | None:
    """Velocities of velocities are not what anybody means."""
    builders = [layer for layer in parts.compression.layers() if layer.own_traits.accumulates]
    if len(builders) < 2:
        return None
    return Refusal(
        f"compression: {builders[-1].name} has momentum already; {builders[0].name} would add it again",
        dataclasses.replace(parts, compression=without(parts.compression, builders[0])),
    )


def residuals_are_kept_inside_momentum(parts: Parts) -> Refusal | None:
    """A residual is input minus what was sent, so what is sent must not hold more than the input."""
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
    """The part of a payload that was only added to be right on average would come back, larger every step."""
    for layer in parts.compression.layers():
        if isinstance(layer, Wrapper) and layer.own_traits.keeps_residual and layer.inner.traits.amplifies:
            return Refusal(
                f'compression: {layer.name} around "{layer.inner}" would grow for ever, because what is sent there is '
                "enlarged to be right on average",
                dataclasses.replace(parts, compression=without(parts.compression, layer)),
            )
    return None
