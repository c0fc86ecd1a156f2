"""Which combinations cannot work, why, and the nearest one that can.

A rule looks only at what methods declare about themselves, never at their names, so a new method is judged by the
same rules as the old ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from laconic.architecture import Architecture
from laconic.compression import Compressor, NoCompression, Wrapper
from laconic.errors import IllegalCombination
from laconic.scheduling import Schedule
from laconic.synchronization import Synchronization


@dataclass(frozen=True)
class Parts:
    """One choice per axis, not yet known to fit together."""

    synchronization: Synchronization
    architecture: Architecture
    compression: Compressor
    scheduling: Schedule

    def text(self) -> str:
        """Canonical text."""
        return " / ".join(map(str, (self.synchronization, self.architecture, self.compression, self.scheduling)))


@dataclass(frozen=True)
class Refusal:
    """Why a combination cannot work, and what to use instead."""

    reason: str
    nearest: Parts
    """Free of this fault; other rules may still refuse it."""


Rule = Callable[[Parts], Refusal | None]


def _a_wrapper_needs_a_loss(parts: Parts) -> Refusal | None:
    """A wrapper that works on what is lost has no effect where nothing is."""
    for layer in parts.compression.layers():
        if isinstance(layer, Wrapper) and layer.needs_loss and layer.inner.lossless:
            return Refusal(
                f'compression: {layer.name} has no effect on "{layer.inner}", which loses nothing',
                dataclasses.replace(parts, compression=_without(parts.compression, layer)),
            )
    return None


def _no_wrapper_twice(parts: Parts) -> Refusal | None:
    """The same wrapper twice would keep the same error twice."""
    seen: set[str] = set()
    for layer in parts.compression.layers():
        if isinstance(layer, Wrapper):
            if layer.name in seen:
                return Refusal(
                    f'compression: {layer.name} is applied twice in "{parts.compression}"',
                    dataclasses.replace(parts, compression=_without(parts.compression, layer)),
                )
            seen.add(layer.name)
    return None


RULES: tuple[Rule, ...] = (_no_wrapper_twice, _a_wrapper_needs_a_loss)


def check_legal(parts: Parts) -> None:
    """Raise IllegalCombination, with the reason and the nearest legal choice, if the parts do not fit."""
    refusal = _first_refusal(parts)
    if refusal is None:
        return
    nearest = refusal.nearest
    while (further := _first_refusal(nearest)) is not None:  # each takes something away, so this ends
        nearest = further.nearest
    raise IllegalCombination(f'{refusal.reason}. Nearest that works: "{nearest.text()}".')


def cannot_combine(parts: Parts, wrappers: list[type[Wrapper]]) -> list[str]:
    """What this legal strategy cannot be extended by, in words."""
    refused: list[str] = []
    for wrapper in wrappers:
        extended = Parts(parts.synchronization, parts.architecture, wrapper(parts.compression), parts.scheduling)
        refusal = _first_refusal(extended)
        if refusal is not None:
            refused.append(f"+ {wrapper.name}: {refusal.reason.removeprefix('compression: ')}")
    return refused


def _first_refusal(parts: Parts) -> Refusal | None:
    return next((refusal for rule in RULES if (refusal := rule(parts)) is not None), None)


def _without(compression: Compressor, unwanted: Compressor) -> Compressor:
    """The same stack of wrappers with one layer taken out."""
    if compression is unwanted:
        return compression.inner if isinstance(compression, Wrapper) else NoCompression()
    if isinstance(compression, Wrapper):
        return dataclasses.replace(compression, inner=_without(compression.inner, unwanted))
    return compression
