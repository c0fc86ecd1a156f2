"""Changes to a stack of compressors: what a refusal names as the nearest that works is made of these."""

from __future__ import annotations

import dataclasses

from laconic.compression import Compressor, NoCompression, Wrapper
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


def moved_beneath(compression: Compressor, layer: Wrapper, target: Wrapper) -> Compressor:
    """The same stack with `layer` taken out and put around what `target` wraps."""
    if compression is target:
        return dataclasses.replace(target, inner=dataclasses.replace(layer, inner=target.inner))
    assert isinstance(compression, Wrapper)
    inner = moved_beneath(compression.inner, layer, target)
    return inner if compression is layer else dataclasses.replace(compression, inner=inner)


def in_words(kind: type[Method]) -> str:
    """What kind of method that is, from the first half of its first sentence."""
    words = kind.summary().split(";")[0].rstrip(".")
    return words[0].lower() + words[1:]
