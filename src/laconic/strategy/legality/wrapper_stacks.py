"""Changes to a stack of compressors, from which a refusal makes its nearest legal choice."""

from __future__ import annotations

import dataclasses

from laconic.compression import Compressor, EfSignSgd, NoCompression, Packed, Wrapper
from laconic.settings import Method


def without(compression: Compressor, unwanted: Compressor) -> Compressor:
    """The same stack of wrappers with one layer taken out."""
    if compression is unwanted:
        return compression.inner if isinstance(compression, Wrapper) else NoCompression()
    if isinstance(compression, Wrapper):
        return dataclasses.replace(compression, inner=without(compression.inner, unwanted))
    return compression


def replaced(compression: Compressor, old: Compressor, new: Compressor) -> Compressor:
    """The same stack with one layer replaced."""
    if compression is old:
        return new
    assert isinstance(compression, Wrapper)
    return dataclasses.replace(compression, inner=replaced(compression.inner, old, new))


def sends_directions(compression: Compressor) -> Compressor | None:
    """The method in a stack, or in a setting of one of its layers, that sends only directions, if any."""
    for layer in compression.layers():
        for held in [*_held(layer).values(), layer]:
            if not held.own_traits.keeps_scale:
                return held
    return None


def with_sizes(compression: Compressor) -> Compressor:
    """The same stack with scaled signs in the place of a method that sends only directions."""
    defaults = {field.name: field.default for field in dataclasses.fields(compression)}
    usual = {key: defaults[key] for key, held in _held(compression).items() if not held.traits.keeps_scale}
    if isinstance(compression, Wrapper):
        return dataclasses.replace(compression, inner=with_sizes(compression.inner), **usual)
    if usual:
        return dataclasses.replace(compression, **usual)
    return compression if compression.traits.keeps_scale else EfSignSgd()


def _held(layer: Compressor) -> dict[str, Compressor]:
    """The compressors that a layer has as settings."""
    held = {key: getattr(layer, key) for key, setting in layer.declared().items() if setting.kind == "method"}
    return {key: value for key, value in held.items() if isinstance(value, Compressor)}


def that_rounds_sums(layer: Compressor) -> dict[str, Compressor]:
    """The settings of a layer that hold a method which rounds sums."""
    return {key: held for key, held in _held(layer).items() if held.traits.rounds_sums}


def with_a_route(layer: Compressor) -> Compressor | None:
    """The layer, or a method in one of its settings, whose route has been set, if any."""
    methods = (layer, *_held(layer).values())
    return next((one for one in methods if isinstance(one, Packed) and "route" in one.changed_settings()), None)


def with_usual_route(layer: Compressor) -> Compressor:
    """The same method with the default route, also of the methods in its settings."""
    usual: dict[str, object] = {key: with_usual_route(held) for key, held in _held(layer).items()}
    if isinstance(layer, Packed):
        usual["route"] = next(field.default for field in dataclasses.fields(layer) if field.name == "route")
    return dataclasses.replace(layer, **usual)


def moved_beneath(compression: Compressor, layer: Wrapper, target: Wrapper) -> Compressor:
    """The same stack with `layer` moved directly around the compressor that `target` wraps."""
    if compression is target:
        return dataclasses.replace(target, inner=dataclasses.replace(layer, inner=target.inner))
    assert isinstance(compression, Wrapper)
    inner = moved_beneath(compression.inner, layer, target)
    return inner if compression is layer else dataclasses.replace(compression, inner=inner)


def in_words(kind: type[Method]) -> str:
    """The kind of a method, from the first half of its first sentence."""
    words = kind.summary().split(";")[0].rstrip(".")
    return words[0].lower() + words[1:]
