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
    def whole(self) -> Batch | None:
        """The one range of the row that is encoded; None: there are several, or none."""
        return self._batches[0] if len(self._batches) == 1 and len(self._batches[0].places) == 1 else None

    @property
    def part(self) -> BucketState:
        """The state of its first batch."""
        return self._state.part(self._first)

    def covers(self, row: torch.Tensor) -> bool:
        """Whether the row is encoded as one range, without padding."""
        whole = self.whole
        return whole is not None and whole.places[0] == slice(0, len(row))

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

    def write_sum_to(self, row: torch.Tensor, payloads: Iterator[Payload], compression: Codec) -> None:
        """Decode the next stacked payloads, add them up in the order of ranks, and write the sum; padding becomes 0."""
        if not self.covers(row):
            row.zero_()
        for (batch, part), stacked in zip(self._parts(), payloads, strict=False):
            if len(batch.places) == 1:
                compression.sum_decoded_rows(stacked, row[batch.places[0]], part)
                continue
            total = row.new_empty(part.bucket.numel)
            compression.sum_decoded_rows(stacked, total, part)
            for place, values in batch.placed(total):
                row[place] = values


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


def one_range(state: BucketState, compression: Codec, num_rows: int) -> slice | None:
    """The range of every row that can be encoded in all rows at once, cached with the state; None: there is none."""
    key = ("one range", num_rows)
    if key not in state.tables:
        wholes = [row.whole for row in coded_rows(state, compression, num_rows)]
        alike = {(whole.places[0].start, whole.bucket.layout) for whole in wholes if whole is not None}
        can = not compression.traits.by_name and len(alike) == 1 and None not in wholes
        state.tables[key] = wholes[0].places[0] if can and wholes[0] is not None else None
    found: slice | None = state.tables[key]
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


def added_up(rows: torch.Tensor, state: BucketState, compression: Codec, group: Members, out: torch.Tensor) -> Exchange:
    """Send each member of a group its row; fill `out` with the sum of this rank's row over all members."""
    coded = coded_rows(state, compression, len(rows))
    place = one_range(state, compression, len(rows))
    if place is None:
        yield from shares_added_up(rows, [[row] for row in coded], compression, group, [out])
        return
    stacked = compression.encode_rows(rows[:, place], [row.part for row in coded])
    mine = stacked.row(group.rank)
    work, received = group.scatter(_bytes_of(stacked, len(rows)))
    yield work
    coded[group.rank].write_sum_to(out, iter(read_payloads(received, [mine])), compression)


def shares_added_up(
    rows: Rows, shares: Sequence[Sequence[CodedRow]], compression: Codec, group: Members, out: Sequence[torch.Tensor]
) -> Exchange:
    """Send each member of a group the rows that it sums; fill `out` with the sums of this rank's rows.

    shares: for each member the rows that it adds up.
    """
    packed, mine = _encoded(rows, shares, compression, group.rank, out[0].device)
    work, received = group.scatter(packed)
    yield work
    found = iter(read_payloads(received, mine))
    for row, total in zip(shares[group.rank], out, strict=True):
        row.write_sum_to(total, found, compression)


def _encoded(
    rows: Rows, shares: Sequence[Sequence[CodedRow]], compression: Codec, rank: int, device: torch.device
) -> tuple[torch.Tensor, list[Payload]]:
    """A row of bytes for each member, and this rank's payloads."""
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
