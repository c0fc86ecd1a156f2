"""Copies of a bucket and its state from before an exchange, to undo the exchange."""

from __future__ import annotations

import torch

from laconic.core.stateful import BucketState

_KEY = "elastic.undo"


class Undo:
    """A copy of a bucket's gradient and state, made before each exchange in the same memory."""

    def __init__(self) -> None:
        self._flat: torch.Tensor | None = None
        self._fields: dict[str, torch.Tensor] = {}
        self._whole: dict[str, dict[str, torch.Tensor]] = {}
        self._parts: list[Undo] = []

    @classmethod
    def of(cls, state: BucketState) -> Undo:
        """The copy for a bucket."""
        return state.tables.setdefault(_KEY, cls())

    def take(self, flat: torch.Tensor | None, state: BucketState) -> None:
        """Copy the values that the exchange is about to change."""
        if flat is not None:
            self._flat = _copied(self._flat, flat)
        self._fields = {name: _copied(self._fields.get(name), value) for name, value in _fields(state).items()}
        # These may be replaced rather than overwritten, and are small.
        self._whole = {field: {k: v.clone() for k, v in values.items()} for field, values in state.whole.items()}
        self._parts = self._parts or [Undo() for _ in state.parts]
        for undo, part in zip(self._parts, state.parts, strict=True):
            undo.take(None, part)

    def put_back(self, flat: torch.Tensor | None, state: BucketState) -> None:
        """Restore everything, bit for bit."""
        if flat is not None and self._flat is not None:
            flat.copy_(self._flat)
        for name in [name for name in state.flat if name not in self._fields]:
            del state.flat[name]
        for name, value in _fields(state).items():
            value.copy_(self._fields[name])
        state.whole.clear()
        state.whole.update({field: {k: v.clone() for k, v in values.items()} for field, values in self._whole.items()})
        state.owed = None
        for undo, part in zip(self._parts, state.parts, strict=True):
            undo.put_back(None, part)


def _fields(state: BucketState) -> dict[str, torch.Tensor]:
    """All state with one value per element, in its memory layout."""
    packed = {f"{name}.{key}": part for name, one in state.packed.items() for key, part in one.tensors.items()}
    return state.flat | packed


def _copied(memory: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    if memory is None or memory.shape != value.shape or memory.dtype != value.dtype:
        return value.clone()
    return memory.copy_(value)
