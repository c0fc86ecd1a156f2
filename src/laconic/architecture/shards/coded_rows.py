"""Rows of pieces in FSDP2's layout, encoded as bytes: payloads of gradients and of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch

from laconic.architecture.contract import Codec
from laconic.core.exchange import Exchange
from laconic.core.moment import Moment
from laconic.core.payload import Payload
from laconic.core.shard_rows import Batch, Layout, batches_of, layout_of
from laconic.core.stateful import BucketState
from laconic.core.transport import Transport, Work

Rows = torch.Tensor | Mapping[int, torch.Tensor]
"""A row for each owner."""


def row_batches(layout: Layout, compression: Codec) -> list[list[Batch]]:
    """For each owner the pieces that are encoded at once: all, unless compression would mix them."""
    together = compression.traits.tensor_by_tensor
    return [batches_of(layout, owner, together=together) for owner in range(len(layout.rows))]


def rows_bytes(layout: Layout, compression: Codec, moment: Moment) -> list[int]:
    """Bytes of the payloads of each row; rows of the same shapes are computed only once."""
    traits, known = compression.traits, dict[object, int]()
    found: list[int] = []
    for owner, row in enumerate(layout.rows):
        alike = owner if traits.by_name else tuple(piece.shape for piece in row)
        if alike not in known:
            batches = batches_of(layout, owner, together=traits.tensor_by_tensor)
            known[alike] = sum(compression.payload_bytes(batch.bucket, moment) for batch in batches)
        found.append(known[alike])
    return found


class CodedRow:
    """The batches of one owner's row, each with its state."""

    def __init__(self, owner: int, batches: Sequence[Batch], state: BucketState, first: int) -> None:
        self.owner = owner
        self._batches = batches
        self._state = state
        self._first = first

    def _parts(self) -> Iterator[tuple[Batch, BucketState]]:
        return ((batch, self._state.part(self._first + number)) for number, batch in enumerate(self._batches))

    @property
    def whole(self) -> tuple[slice, BucketState] | None:
        """The one range of the row that is encoded, with its state; None: there are several, or none."""
        if len(self._batches) != 1 or len(self._batches[0].places) != 1:
            return None
        return self._batches[0].places[0], self._state.part(self._first)

    def values(self, row: torch.Tensor) -> list[tuple[torch.Tensor, BucketState]]:
        """The parts of a row that are encoded, each with its state."""
        return [(batch.taken_from(row), part) for batch, part in self._parts()]

    def write_to(self, rows: torch.Tensor, payloads: Iterator[Payload], compression: Codec) -> None:
        """Decode the next stacked payloads, one into each row."""
        for (batch, part), stacked in zip(self._parts(), payloads, strict=False):
            if len(batch.places) == 1:
                compression.decode_rows(stacked, rows[:, batch.places[0]], part)
                continue
            for number, row in enumerate(rows):
                for place, values in batch.placed(_decoded(stacked.row(number), row, part, compression)):
                    row[place] = values

    def add_to(self, row: torch.Tensor, payloads: Iterator[Payload], compression: Codec) -> None:
        """Decode the next stacked payloads and add all of them, in the order of ranks."""
        for (batch, part), stacked in zip(self._parts(), payloads, strict=False):
            if len(batch.places) == 1:
                compression.add_decoded_rows(stacked, row[batch.places[0]], part)
                continue
            for number in range(len(stacked.tensors[0])):
                for place, values in batch.placed(_decoded(stacked.row(number), row, part, compression)):
                    row[place] += values


def _decoded(payload: Payload, like: torch.Tensor, part: BucketState, compression: Codec) -> torch.Tensor:
    values = like.new_empty(part.bucket.numel)
    compression.decode(payload, values, part)
    return values


def coded_rows(state: BucketState, compression: Codec, num_rows: int) -> list[CodedRow]:
    """The rows of a state's bucket, cached with the state."""
    key = ("coded rows", num_rows)
    if key not in state.tables:
        rows, first = [], 0
        for owner, batches in enumerate(row_batches(layout_of(state.bucket, num_rows), compression)):
            rows.append(CodedRow(owner, batches, state, first))
            first += len(batches)
        state.tables[key] = rows
    found: list[CodedRow] = state.tables[key]
    return found


class Members(Protocol):
    """The ranks that send each other rows."""

    @property
    def rank(self) -> int:
        """This rank's number among them."""
        ...

    def scatter(self, rows: torch.Tensor) -> tuple[Work, torch.Tensor]:
        """Start sending row r to rank r; the second value has the row each rank sent here once the work is done."""
        ...


class AllRanks:
    """The operations of a transport."""

    def __init__(self, transport: Transport, what: str) -> None:
        self._transport = transport
        self._what = what

    @property
    def rank(self) -> int:
        return self._transport.rank

    def scatter(self, rows: torch.Tensor) -> tuple[Work, torch.Tensor]:
        received = torch.empty_like(rows)
        return self._transport.all_to_all(received, rows, what=self._what), received


def added_up(
    rows: Rows, shares: Sequence[Sequence[CodedRow]], compression: Codec, group: Members, out: Sequence[torch.Tensor]
) -> Exchange:
    """Send each member of a group the rows that it sums; fill `out` with the sums of this rank's rows.

    shares: for each member the rows that it adds up.
    """
    packed, mine = _encoded_at_once(rows, shares, compression, group.rank) or _encoded(
        rows, shares, compression, group.rank, out[0].device
    )
    work, received = group.scatter(packed)
    yield work
    for total in out:
        total.zero_()
    found = iter(read_payloads(received, mine))
    for row, total in zip(shares[group.rank], out, strict=True):
        row.add_to(total, found, compression)


def _encoded_at_once(
    rows: Rows, shares: Sequence[Sequence[CodedRow]], compression: Codec, rank: int
) -> tuple[torch.Tensor, list[Payload]] | None:
    """A row of bytes for each member, and this rank's payload; None unless all rows are encoded whole and are alike."""
    coded = [row for share in shares for row in share]
    if not isinstance(rows, torch.Tensor) or [row.owner for row in coded] != list(range(len(shares))):
        return None
    found = [whole for row in coded if (whole := row.whole) is not None]
    if len(found) < len(coded) or compression.traits.by_name:
        return None
    (place, first), parts = found[0], [part for _, part in found]
    if any(other != place or part.bucket.layout != first.bucket.layout for other, part in found):
        return None
    stacked = compression.encode_rows(rows[:, place], parts)
    return _bytes_of(stacked, len(coded)), [stacked.row(rank)]


def _encoded(
    rows: Rows, shares: Sequence[Sequence[CodedRow]], compression: Codec, rank: int, device: torch.device
) -> tuple[torch.Tensor, list[Payload]]:
    """As `_encoded_at_once`, piece by piece."""
    payloads = [
        [compression.encode(taken, part) for row in share for taken, part in row.values(rows[row.owner])]
        for share in shares
    ]
    # Of the longest share: every rank has pieces of the same lengths.
    width = max(sum(payload.nbytes for payload in share) for share in payloads)
    packed = torch.zeros((len(shares), width), dtype=torch.uint8, device=device)
    for filled, share in zip(packed, payloads, strict=True):
        found = packed_row(share, device)
        filled[: len(found)] = found
    return packed, payloads[rank]


def packed_row(payloads: Sequence[Payload], device: torch.device) -> torch.Tensor:
    """The bytes of payloads, one after the other; without a copy, if there is one tensor."""
    parts = [_bytes_of(payload, 1)[0] for payload in payloads]
    return parts[0] if len(parts) == 1 else torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *parts])


def _bytes_of(stacked: Payload, count: int) -> torch.Tensor:
    """The bytes of `count` stacked payloads, a row for each; without a copy, if they have one tensor."""
    parts = [tensor.contiguous().view(count, -1).view(torch.uint8) for tensor in stacked.tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def read_payloads(rows: torch.Tensor, like: Sequence[Payload]) -> list[Payload]:
    """Stacked payloads of the same dtypes and shapes as these, from rows of bytes."""
    found: list[Payload] = []
    at = 0
    for payload in like:
        tensors: list[torch.Tensor] = []
        for tensor in payload.tensors:
            taken = rows[:, at : at + tensor.nbytes].view(tensor.dtype)
            tensors.append(taken.view(len(rows), *tensor.shape))
            at += tensor.nbytes
        found.append(Payload(tuple(tensors)))
    return found
