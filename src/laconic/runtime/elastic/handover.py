"""Ranks that leave hand over their residuals, whose sum over all ranks counts, to one that stays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from laconic.core.eight_bits import EightBits
from laconic.core.exchange import Exchange, one_round
from laconic.core.stateful import BucketState, Resize
from laconic.runtime.job import Job


class HandOver:
    """The exchange of the residuals of ranks that leave; it may be repeated before it is applied once."""

    def __init__(
        self, states: Sequence[BucketState], kinds: Mapping[str, Resize], me: str, leaving: Sequence[str]
    ) -> None:
        self._owed = list(_owed(states, kinds))
        self._me = me
        self._leaving = leaving
        self._received: list[list[torch.Tensor]] = []

    def exchange(self, job: Job, members: Sequence[str]) -> None:
        """Send this rank's residuals, or receive those of others."""
        self._received = []
        staying = [name for name in members if name not in self._leaving]
        if not staying:
            return
        for name in self._leaving:
            if name in members and self._me in (name, staying[0]):
                self._one(job, members.index(name), members.index(staying[0]), receives=self._me == staying[0])

    def _one(self, job: Job, giver: int, taker: int, *, receives: bool) -> None:
        owed = [one.read() for one in self._owed]
        tensors = [torch.empty_like(value) for value in owed] if receives else owed
        what = f"what rank {giver} owes"

        def start() -> Exchange:
            for tensor in tensors:
                sends = [] if receives else [(taker, tensor.contiguous())]
                gets = [(giver, tensor)] if receives else []
                yield from one_round(job.transport.send_receive(sends, gets, purpose="control", what=what))

        if tensors:
            job.engine.call(what, start, step=job.step, device=tensors[0].device)
        if receives:
            self._received.append(tensors)

    def apply(self) -> None:
        """Add the received residuals to this rank's own."""
        with torch.no_grad():
            for tensors in self._received:
                for mine, theirs in zip(self._owed, tensors, strict=True):
                    mine.add(theirs)


class _Plain:
    """Values in a tensor."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def read(self) -> torch.Tensor:
        return self._values

    def add(self, others: torch.Tensor) -> None:
        self._values += others


class _Packed:
    """Values in eight bits; the sum is rounded to that."""

    def __init__(self, values: EightBits) -> None:
        self._values = values

    def read(self) -> torch.Tensor:
        return self._values.read()

    def add(self, others: torch.Tensor) -> None:
        self._values.write(self._values.read() + others)


def _owed(states: Sequence[BucketState], kinds: Mapping[str, Resize]) -> Iterator[_Plain | _Packed]:
    """All state whose sum over all ranks counts."""
    for state in states:
        for name in sorted(state.flat):
            if kinds.get(name) == "sum":
                yield _Plain(state.flat[name])
        for name in sorted(state.packed):
            if kinds.get(name) == "sum":
                yield _Packed(state.packed[name])
        for field in sorted(state.whole):
            if kinds.get(field) == "sum":
                for key in sorted(state.whole[field]):
                    yield _Plain(state.whole[field][key])
        yield from _owed(state.parts, kinds)
