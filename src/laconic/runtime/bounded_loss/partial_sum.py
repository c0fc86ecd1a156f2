"""One exchange as one rank sees it: the rows that it owns, added up as they arrive, and the means of all rows.

An exchange may begin before this rank's own training loop reaches it: then it adds up the rows that the others send, so
that they need not wait for a rank that is late. A row that arrives twice is counted once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from laconic.errors import CommunicationError
from laconic.runtime.bounded_loss.frames import DTYPES, Numbers
from laconic.runtime.bounded_loss.retries import Retries, RoundTrip
from laconic.runtime.datagrams import Bytes

Flags = npt.NDArray[np.bool_]


class PartialSum:
    """The rows of one exchange. Times are given, in seconds of any clock."""

    def __init__(
        self,
        number: int,
        shape: tuple[int, int, int],
        *,
        rank: int,
        trips: Sequence[RoundTrip],
        limit_s: float | None,
        now_s: float,
    ) -> None:
        """`trips`: one for each rank. `limit_s`: how long rows are waited for; None: as long as it takes."""
        num_rows, row_bytes, code = shape
        self.number = number
        self.shape = shape
        """Rows that each rank owns, bytes of a row, and the code of its dtype: the same on every rank."""
        self.opened_s = self.last_part_s = now_s
        self.limit_s = limit_s
        self.closed = False
        """Whether the sums of this rank's rows are final."""
        self.finished = False
        """Whether this rank has all means, and has handed them out."""
        self.lost = 0
        """Rows of all ranks that are not in the sums, once these are final."""
        self.mine: Bytes | None = None
        """The rows of this rank for each owner, while one of them may want them."""
        self._rank = rank
        world_size = len(trips)
        self._dtype = DTYPES[code]
        self._values: Bytes | None = np.empty((world_size, num_rows, row_bytes), np.uint8)
        """Rows of all ranks as they came, until they are added up."""
        self._parts: Flags = np.zeros((world_size, num_rows), bool)
        self._parts_ended: Flags = np.zeros(world_size, bool)
        """By rank: whether it has sent all its rows once."""
        self._means_ended: Flags = np.zeros(world_size, bool)
        self._come: Flags = np.zeros((world_size, num_rows), bool)
        self._own: Bytes | None = None
        """Means of the rows that this rank owns, for others that ask."""
        self._means: Bytes | None = None
        self.part_retries = [Retries(trip, now_s) for trip in trips]
        self.mean_retries = [Retries(trip, now_s) for trip in trips]
        self.parts_sent = [0] * world_size
        """By rank: how many of its rows have been sent to it once; rows that were not sent cannot be lost."""
        self.means_sent = [0] * world_size
        self.parts_lost = [0] * world_size
        """By rank: how many frames of this rank it has reported as missed."""
        self.means_lost = [0] * world_size

    @property
    def begun(self) -> bool:
        """Whether this rank's training loop has reached this exchange."""
        return self.mine is not None or self.finished

    @property
    def expected(self) -> int:
        """Rows that this rank would add up if all arrived."""
        return self._parts.size

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that this rank owns."""
        return self.shape[0] * self.shape[1]

    def check_shape(self, shape: tuple[int, int, int], rank: int) -> None:
        """Raise CommunicationError if the rows that `rank` sends have another shape than those exchanged here."""
        if shape != self.shape:
            raise CommunicationError(
                f"ranks exchange different things: in exchange {self.number} rank {rank} has {shape[0]} rows of "
                f"{shape[1]} bytes, code {shape[2]}, and rank {self._rank} has {self.shape[0]} of {self.shape[1]}, "
                f"code {self.shape[2]}"
            )

    # -- the rows that this rank owns ----------------------------------------------------------------------------

    def begin(self, mine: Bytes, now_s: float) -> None:
        """This rank's rows for each owner are known."""
        self.mine = mine
        for retries in self.mean_retries:
            retries.start(now_s)
        if not self.closed:
            self.add(self._rank, np.arange(self.shape[0]), mine[self._rank], now_s)
            self.end_parts(self._rank)

    def add(self, rank: int, rows: Numbers, values: Bytes, now_s: float) -> None:
        """Add rows of a rank that have not been added before."""
        new = _first_of_each(rows) & ~self._parts[rank, rows]
        if self._values is None or not new.any():
            return
        rows, values = rows[new], values[new]
        self._parts[rank, rows] = True
        self._values[rank, rows] = values
        self.last_part_s = now_s
        self.part_retries[rank].hear(now_s)

    def end_parts(self, rank: int) -> None:
        """A rank has sent all its rows once."""
        self._parts_ended[rank] = True

    def has_ended(self, rank: int) -> bool:
        """Whether a rank has said that it has sent all its rows once."""
        return bool(self._parts_ended[rank])

    @property
    def complete(self) -> bool:
        """Whether all rows of all ranks are there."""
        return bool(self._parts.all())

    @property
    def all_ended(self) -> bool:
        """Whether every rank has sent all its rows: rows that are still missing were lost."""
        return bool((self._parts_ended | self._parts.all(1)).all())

    @property
    def missing(self) -> int:
        """Rows of all ranks that are not there."""
        return self._parts.size - int(np.count_nonzero(self._parts))

    @property
    def can_close(self) -> bool:
        """Whether at least one rank's values are there for every row."""
        return not self.closed and bool(self._parts.any(0).all())

    def missing_parts(self, rank: int) -> Numbers:
        """The rows of a rank that are not there."""
        return np.flatnonzero(~self._parts[rank])

    def lost_parts(self, rank: int) -> int:
        """Rows of a rank that are missing, though it has sent all or later ones have come."""
        return len(self.missing_parts(rank)) if self._parts_ended[rank] else _num_gaps(self._parts[rank])

    def close(self, now_s: float) -> None:
        """Make sums final: values missing from a row count as the mean of those that are there.

        Rows are added in the order of ranks, not of arrival: if all are there, every run gives the same bits.
        """
        assert self._values is not None, "closed before"
        wide = torch.float64 if self._dtype == torch.float64 else torch.float32
        parts, there = torch.from_numpy(self._values).view(self._dtype), torch.from_numpy(self._parts)
        sums = torch.zeros(parts.shape[1:], dtype=wide)
        for rows, present in zip(parts, there, strict=True):
            sums[present] += rows[present].to(wide)
        sums *= (len(there) / there.sum(0).double()).to(wide)[:, None]
        self._values = None
        self.lost = self.missing
        self.closed = True
        for retries in self.mean_retries:
            retries.start(now_s)  # others close at about the same time
        self._own = sums.to(self._dtype).view(torch.uint8).numpy()
        self._table()[self._rank] = self._own
        self._come[self._rank] = True

    # -- the means of all rows -----------------------------------------------------------------------------------

    def take(self, owner: int, rows: Numbers, values: Bytes, now_s: float) -> None:
        """Keep means that an owner has sent."""
        new = ~self._come[owner, rows]
        if self.finished or owner == self._rank or not new.any():
            return
        self._table()[owner, rows[new]] = values[new]
        self._come[owner, rows[new]] = True
        self.mean_retries[owner].hear(now_s)

    def end_means(self, owner: int) -> None:
        """An owner has sent all its means once."""
        self._means_ended[owner] = True

    def means_of(self, rows: Numbers) -> Bytes:
        """Means of rows that this rank owns."""
        assert self._own is not None, "not closed"
        return self._own[rows]

    def owner_closed(self, owner: int) -> bool:
        """Whether an owner has begun to send means, so that it wants no rows any more."""
        return bool(self._means_ended[owner] or self._come[owner].any())

    def missing_means(self, owner: int) -> Numbers:
        """The rows of an owner whose means have not come."""
        return np.flatnonzero(~self._come[owner])

    def lost_means(self, owner: int) -> int:
        """Means of an owner that are missing, though it has sent all or later ones have come."""
        return len(self.missing_means(owner)) if self._means_ended[owner] else _num_gaps(self._come[owner])

    @property
    def num_sent(self) -> int:
        """Frames that this rank sends to others: rows, and means of its own rows."""
        return 2 * (len(self._parts) - 1) * self.shape[0]

    @property
    def num_lost(self) -> int:
        """Those of them that others have missed."""
        return min(self.num_sent, sum(self.parts_lost) + sum(self.means_lost))

    @property
    def all_means(self) -> bool:
        """Whether the means of all rows are here."""
        return bool(self._come.all())

    def finish(self) -> Bytes:
        """The means of all rows, owner by owner; of these only this rank's own are kept, for others that ask."""
        table = self._table()
        self.mine, self._means, self.finished = None, None, True
        return table

    def _table(self) -> Bytes:
        if self._means is None:
            self._means = np.empty((len(self._parts), *self.shape[:2]), np.uint8)
        return self._means


def _num_gaps(there: Flags) -> int:
    """The number of unset flags before the last set one."""
    places = np.flatnonzero(there)
    return int(places[-1]) + 1 - len(places) if len(places) else 0


def _first_of_each(rows: Numbers) -> Flags:
    """Flags for the places at which a number occurs for the first time."""
    first = np.zeros(len(rows), bool)
    first[np.unique(rows, return_index=True)[1]] = True
    return first
