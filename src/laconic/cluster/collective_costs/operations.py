"""Collective operations: what their bytes mean, in how many steps they run and what each GPU sends.

    operation        bytes are             steps       each GPU sends
    all_reduce       the reduced buffer    2 (n - 1)   2 (n - 1) / n * bytes
    all_gather       the gathered buffer   n - 1       (n - 1) / n * bytes
    reduce_scatter   the input buffer      n - 1       (n - 1) / n * bytes
    all_to_all       one GPU's buffer      n - 1       (n - 1) / n * bytes
    broadcast        the buffer            n - 1       bytes, passed on from GPU to GPU
    send             the message           1           bytes

A step of all but the last two moves one chunk, bytes / n.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from laconic.errors import UsageError, did_you_mean, one_line


@dataclass(frozen=True)
class Operation:
    """One collective operation."""

    name: str
    passes: int
    """How many times the buffer goes round: an all-reduce is a reduce-scatter and an all-gather."""
    measured: bool = True
    """Whether tables contain it; broadcast and send are derived from operations that move the same bytes."""

    def steps(self, gpus: int) -> int:
        """Rounds of messages between neighbours."""
        return self.passes * (gpus - 1)

    def sent_bytes(self, nbytes: float, gpus: int) -> float:
        """The bytes that each GPU sends."""
        if gpus == 1:
            return 0.0
        return nbytes * (self.passes * (gpus - 1) / gpus if self.measured else 1)


OPERATIONS: Mapping[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation("all_reduce", 2),
        Operation("all_gather", 1),
        Operation("reduce_scatter", 1),
        Operation("all_to_all", 1),
        Operation("broadcast", 1, measured=False),
        Operation("send", 1, measured=False),
    )
}
"""By name."""


def operation(name: str) -> Operation:
    """The operation of that name."""
    if name not in OPERATIONS:
        raise UsageError(f'there is no operation "{one_line(name, 40)}". {did_you_mean(name, OPERATIONS)}')
    return OPERATIONS[name]
