"""The slots of an aggregator, in which the frames of all ranks are added up.

    chunk c is in place c mod 2S of 2S places, S slots in each of two halves

A rank sends chunk c when it has the sum of chunk c - S. So when chunk c arrives, every rank has the sum of chunk c - 2S
that was in the same place, and it can be overwritten; sums of the other half can still be requested again. Memory is 2
S frames, however large a model is. Integers are added, so the order of ranks changes nothing.

Reference: Sapio et al. 2021 (SwitchML), NSDI, algorithms 3 and 4.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from laconic.errors import CommunicationError
from laconic.runtime.in_network.frames import DTYPES, LARGEST_U16, VALUE_BYTES, Bytes, Frames

Places = npt.NDArray[np.int64]
_EMPTY = -1


@dataclass(frozen=True)
class Outcome:
    """The result of adding frames."""

    complete: Places
    """Places whose sums are sent to all ranks."""
    again: Places
    """Places whose sums are sent again to the sender of the frames."""


@dataclass(frozen=True)
class Sums:
    """Sums of one length and code."""

    code: int
    chunks: npt.NDArray[np.int64]
    values: Bytes


class SlotPool:
    """2 S places for the frames of n ranks."""

    def __init__(self, num_slots: int, world_size: int) -> None:
        self.num_slots = num_slots
        self.world_size = world_size
        places = 2 * num_slots
        self._values = np.zeros((places, VALUE_BYTES), np.uint8)
        self._chunk = np.full(places, _EMPTY, np.int64)
        self._code = np.zeros(places, np.uint8)
        self._nbytes = np.zeros(places, np.int64)
        self._seen = np.zeros((places, world_size), bool)
        self._count = np.zeros(places, np.int64)
        self._opened_s = np.zeros(places)

    def add(self, rank: int, frames: Frames) -> Outcome:
        """Add frames of one rank; raises CommunicationError if ranks send different lengths or codes for a chunk."""
        chunks = frames.headers["chunk"].astype(np.int64)
        places = chunks % len(self._chunk)
        if len(np.unique(places)) < len(places):
            one_by_one = [
                self.add(rank, Frames(frames.headers[at : at + 1], frames.values[at : at + 1]))
                for at in range(len(frames))
            ]
            return Outcome(
                *(np.concatenate([getattr(one, name) for one in one_by_one]) for name in ("complete", "again"))
            )
        late = self._chunk[places] > chunks
        if late.any():
            frames, chunks, places = frames.only(~late), chunks[~late], places[~late]
        self._open(rank, frames, chunks, places)
        self._check_alike(rank, frames, chunks, places)
        fresh = ~self._seen[places, rank]
        again = places[~fresh & (self._count[places] == self.world_size)]
        if not fresh.all():
            frames, places = frames.only(fresh), places[fresh]
        codes = frames.headers["code"]
        for code in np.unique(codes).tolist():
            self._add_up(code, places[codes == code], frames.values[codes == code])
        self._seen[places, rank] = True
        self._count[places] += 1
        return Outcome(places[self._count[places] == self.world_size], again)

    def _open(self, rank: int, frames: Frames, chunks: Places, places: Places) -> None:
        """Assign places to chunks of which no frame has arrived before."""
        new = self._chunk[places] < chunks
        if not new.any():
            return
        mine, opened = chunks[new], places[new]
        held = self._chunk[opened]
        follows = np.where(held == _EMPTY, mine == opened, mine == held + len(self._chunk))
        ready = (held == _EMPTY) | (self._count[opened] == self.world_size)
        if not (follows & ready).all():
            wrong = int(mine[~(follows & ready)][0])
            raise CommunicationError(
                f"rank {rank} has sent chunk {wrong} to a pool of {self.num_slots} slots before the "
                "sum of the previous chunk in that slot was complete"
            )
        self._chunk[opened] = mine
        self._code[opened] = frames.headers["code"][new]
        self._nbytes[opened] = frames.values.shape[1]
        self._seen[opened] = False
        self._count[opened] = 0
        self._opened_s[opened] = time.monotonic()

    def _check_alike(self, rank: int, frames: Frames, chunks: Places, places: Places) -> None:
        nbytes, codes = frames.values.shape[1], frames.headers["code"]
        alike = (self._code[places] == codes) & (self._nbytes[places] == nbytes)
        if not alike.all():
            at = int(np.argmin(alike))
            raise CommunicationError(
                f"ranks sent different things for chunk {chunks[at]}: rank {rank} {nbytes} bytes of code {codes[at]}, "
                f"another {self._nbytes[places[at]]} bytes of code {self._code[places[at]]}"
            )

    def _add_up(self, code: int, places: Places, values: Bytes) -> None:
        """The first frame of a chunk takes its place, the others are added."""
        nbytes, first = values.shape[1], self._count[places] == 0
        self._values[places[first], :nbytes] = values[first]
        others = places[~first]
        if not len(others):
            return
        dtype = DTYPES[code]
        added = np.ascontiguousarray(values[~first]).view(dtype)
        sums = self._values[others, :nbytes].view(dtype)
        (np.maximum if code == LARGEST_U16 else np.add)(sums, added, out=sums)
        self._values[others, :nbytes] = sums.view(np.uint8)

    def sums(self, places: Places) -> list[Sums]:
        """The sums in these places, by length and code."""
        found: list[Sums] = []
        kinds = 2**16 * self._code[places].astype(np.int64) + self._nbytes[places]
        for kind in np.unique(kinds).tolist():
            some = places[kinds == kind]
            found.append(Sums(kind >> 16, self._chunk[some], self._values[some, : kind % 2**16]))
        return found

    def asked(self, rank: int, first: int, count: int) -> tuple[Places, list[int]]:
        """Of `count` chunks from `first` on: places with sums for the rank, and offsets of chunks that lack its part.

        Chunks of which no rank has sent a frame lack its part, too.
        """
        chunks = np.arange(first, first + min(count, self.num_slots), dtype=np.int64)
        places = chunks % len(self._chunk)
        held = self._chunk[places] == chunks
        complete = held & (self._count[places] == self.world_size)
        lacking = (self._chunk[places] < chunks) | (held & ~self._seen[places, rank])
        return places[complete], np.flatnonzero(lacking).tolist()

    def waiting_for(self) -> tuple[float, list[int]]:
        """Seconds the oldest open chunk has waited, and the ranks it waits for; (0, []) if none is open."""
        is_open = (self._chunk != _EMPTY) & (self._count < self.world_size)
        if not is_open.any():
            return 0.0, []
        oldest = int(np.argmin(np.where(is_open, self._opened_s, np.inf)))
        missing = np.flatnonzero(~self._seen[oldest]).tolist()
        return time.monotonic() - float(self._opened_s[oldest]), missing

    @property
    def nbytes(self) -> int:
        """Memory of the pool."""
        tables = (self._values, self._chunk, self._code, self._nbytes, self._seen, self._count, self._opened_s)
        return sum(table.nbytes for table in tables)
