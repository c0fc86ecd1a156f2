"""A collective as data: which rank sends which chunk to whom in which step, and whether it is added up there.

A tensor is cut into `num_chunks` chunks of nearly equal size. In every step a rank sends the chunks its rows name, as
they were when the step began, and receives chunks from others, which are added to its own chunk or replace it. The same
rows are proved (check.py) and executed (execution.py), and their cost is computed (price.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.int32]
"""Rows of a collective; the columns are those of Row."""

_ALIGNED_BYTES = 16
"""Chunks begin at multiples of this, so that no element of any dtype is cut and sizes in bytes say where they begin."""


class Row(NamedTuple):
    """One chunk sent from one rank to another."""

    step: int
    source: int
    destination: int
    chunk: int
    reduce: bool
    """Whether it is added at the destination; otherwise it replaces the chunk."""


@dataclass(frozen=True, eq=False)
class Collective:
    """An all-reduce among `world_size` ranks, step by step."""

    algorithm: str
    world_size: int
    num_chunks: int
    table: Table
    """One line per Row, in the order of steps."""

    @property
    def num_steps(self) -> int:
        """The number of steps."""
        return _num_steps(self.table)

    def rows(self) -> Iterator[Row]:
        """Its rows one by one."""
        for step, source, destination, chunk, reduce in self.table.tolist():
            yield Row(step, source, destination, chunk, bool(reduce))

    @classmethod
    def of(cls, algorithm: str, world_size: int, num_chunks: int, table: Table) -> Collective:
        """A collective of these rows, sorted by steps and made read-only."""
        ordered = table[np.argsort(table[:, 0], kind="stable")]
        ordered.flags.writeable = False
        return cls(algorithm, world_size, num_chunks, ordered)


class Message(NamedTuple):
    """Adjacent chunks that are sent between two ranks in one step."""

    peer: int
    first: int
    stop: int
    """The chunks first <= chunk < stop."""
    reduce: bool


class Turn(NamedTuple):
    """The messages of one rank in one step, all at the same time."""

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()


@lru_cache(maxsize=512)
def program(collective: Collective, rank: int) -> tuple[Turn, ...]:
    """The turns of `rank`, one per step; empty where it has nothing to do.

    Messages are in the order of peers, those of one peer in the order of chunks: so both ends of every pair list them
    in the same order, and a rank adds up received chunks in the order of ranks.
    """
    table = collective.table
    sends = _messages(table[table[:, 1] == rank], peer_column=2)
    receives = _messages(table[table[:, 2] == rank], peer_column=1)
    return tuple(
        Turn(tuple(sends.get(step, ())), tuple(receives.get(step, ()))) for step in range(collective.num_steps)
    )


def _messages(table: Table, peer_column: int) -> dict[int, list[Message]]:
    """The messages of each step, neighbouring chunks together."""
    steps: dict[int, list[Message]] = {}
    order = np.lexsort((table[:, 3], table[:, peer_column], table[:, 0]))
    for row in table[order].tolist():
        step, peer, chunk, reduce = row[0], row[peer_column], row[3], bool(row[4])
        messages = steps.setdefault(step, [])
        last = messages[-1] if messages else None
        if last is not None and (last.peer, last.stop, last.reduce) == (peer, chunk, reduce):
            messages[-1] = Message(peer, last.first, chunk + 1, reduce)
        else:
            messages.append(Message(peer, chunk, chunk + 1, reduce))
    return steps


@lru_cache(maxsize=64)
def halves_of(collective: Collective) -> tuple[Collective, Collective]:
    """The steps up to the last addition, and those that only distribute the result."""
    table = collective.table
    sums = table[table[:, 4] == 1]
    middle = _num_steps(sums)
    first, second = table[table[:, 0] < middle], table[table[:, 0] >= middle].copy()
    second[:, 0] -= middle
    name, size, chunks = collective.algorithm, collective.world_size, collective.num_chunks
    return Collective.of(name, size, chunks, first), Collective.of(name, size, chunks, second)


@lru_cache(maxsize=64)
def renumbered(collective: Collective, order: tuple[int, ...]) -> Collective:
    """The same collective with rank order[i] in the place of rank i."""
    if order == tuple(range(collective.world_size)):
        return collective
    table = collective.table.copy()
    table[:, 1:3] = np.array(order, dtype=np.int32)[table[:, 1:3]]
    return Collective.of(collective.algorithm, collective.world_size, collective.num_chunks, table)


@lru_cache(maxsize=4096)
def chunk_bounds(nbytes: int, num_chunks: int) -> tuple[int, ...]:
    """Where each chunk of `nbytes` begins, and where the last one ends, in bytes."""
    units = -(-nbytes // _ALIGNED_BYTES)
    return tuple(min(nbytes, _ALIGNED_BYTES * (chunk * units // num_chunks)) for chunk in range(num_chunks + 1))


def table_of(
    step: npt.ArrayLike, source: npt.ArrayLike, destination: npt.ArrayLike, chunk: npt.ArrayLike, *, reduce: bool
) -> Table:
    """Rows from columns, which are broadcast as in numpy."""
    columns = np.broadcast_arrays(step, source, destination, chunk, np.int32(reduce))
    return np.stack([column.astype(np.int32).ravel() for column in columns], axis=1)


def no_rows() -> Table:
    """A table without rows."""
    return np.empty((0, 5), dtype=np.int32)


def side_by_side(tables: Sequence[Table]) -> Table:
    """Passes that begin at the same time."""
    return np.concatenate([no_rows(), *tables])


def in_turn(*tables: Table) -> Table:
    """Passes one after the other: each begins when the one before has ended."""
    moved, begins = [], 0
    for table in tables:
        later = table.copy()
        later[:, 0] += begins
        moved.append(later)
        begins += _num_steps(table)
    return side_by_side(moved)


def _num_steps(table: Table) -> int:
    return int(table[:, 0].max()) + 1 if len(table) else 0
