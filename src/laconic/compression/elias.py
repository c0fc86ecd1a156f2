"""Code the levels of a quantizer with a variable number of bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.contract import Compressor, Wrapper
from laconic.compression.families.quantizer import Levels
from laconic.compression.traits import Traits
from laconic.compression.wire.elias import decode_numbers, encode_numbers
from laconic.core.exchange import Exchange, Group, Round
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.errors import IllegalCombination

_AS_PACKED = -1
"""Sent in place of the number of levels: the codes are as the quantizer packs them."""


@dataclass(frozen=True, kw_only=True)
class Elias(Wrapper):
    """Send the levels of a quantizer as Elias gamma codes: gaps between those that are not zero, magnitudes, signs.

        decoded = what the quantizer alone decodes to, bit for bit

    A level of zero only lengthens a gap, so few levels in large blocks become cheap: qsgd(levels=1, block=512) takes
    0.5 bits per value instead of 2. The length of the codes depends on the gradient: a first round exchanges the
    lengths, a second gathers the codes, padded to the longest. Where codes of fixed width are shorter, those are sent.

    Reference: Alistarh et al. 2017, arXiv:1610.02132; Elias 1975.
    """

    name: ClassVar[str] = "elias"
    good_for: ClassVar[str] = "qsgd with few levels in large blocks: fewer bits, the same values"
    # The length of a shard's codes would have to be exchanged as well.
    gathers: ClassVar[bool] = True
    wraps: ClassVar[type[Compressor]] = Levels

    def traits_around(self, inner: Traits) -> Traits:
        """The number of bytes depends on the values of all ranks."""
        return replace(inner, exact_bytes=False, decodes_alone=False, payloads_add_up=False, sends_sums_back=False)

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """The lengths, and at most codes of fixed width."""
        if bucket.numel == 0:
            return ()
        return Round("gather", (8,)), Round("gather", (self._quantizer.packed_bytes(bucket),))

    def num_waits(self, bucket: Bucket, moment: Moment) -> int:
        """One for each round."""
        return len(self.rounds(bucket, moment))

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """Gather the lengths, then the codes."""
        if flat.numel() == 0:
            return
        quantizer = self._quantizer
        packed = quantizer.pack(flat, state)
        if own is not None:
            quantizer.unpack(packed, own, state)
        num_levels, coded = self._coded(packed, state)
        header = torch.tensor([num_levels, coded.numel()], dtype=torch.int32, device=flat.device)
        work, headers = group.gather(header)
        yield work
        # On a GPU the host waits here: it must know how much to send.
        lengths: list[tuple[int, int]] = [(count, size) for count, size in headers.tolist()]
        row = torch.zeros(max(size for _, size in lengths), dtype=torch.uint8, device=flat.device)
        row[: coded.numel()] = coded
        work, rows = group.gather(row)
        yield work
        # In the order of ranks, as the quantizer alone adds up.
        total, one = torch.zeros_like(flat), torch.empty_like(flat)
        for number, (received, (count, size)) in enumerate(zip(rows, lengths, strict=True)):
            self._decode(received[:size], count, one if number else total, state)
            if number:
                total += one
        flat.copy_(total)

    def _coded(self, packed: torch.Tensor, state: BucketState) -> tuple[int, torch.Tensor]:
        """The number of nonzero levels, and scales and codes as bytes."""
        split = self._quantizer.chunks(state).scale_bytes
        with_units = packed.clone()
        with_units[:split].view(torch.float32).fill_(1.0)
        levels = torch.empty(state.bucket.numel, device=packed.device)
        self._quantizer.unpack(with_units, levels, state)
        coded = torch.cat((packed[:split], encode_numbers(levels.to(torch.int64))))
        if coded.numel() >= packed.numel():
            return _AS_PACKED, packed
        return int(levels.count_nonzero()), coded

    def _decode(self, coded: torch.Tensor, num_levels: int, out: torch.Tensor, state: BucketState) -> None:
        if num_levels == _AS_PACKED:
            self._quantizer.unpack(coded, out, state)
            return
        chunks = self._quantizer.chunks(state)
        scales = coded[: chunks.scale_bytes].view(torch.float32)
        levels = decode_numbers(coded[chunks.scale_bytes :], num_levels, out.numel())
        out.copy_(levels * scales[chunks.chunk_of_element()])

    @property
    def _quantizer(self) -> Levels:
        if not isinstance(self.inner, Levels):
            raise IllegalCombination(
                f'compression.elias wraps a quantizer whose codes are levels, such as qsgd, got "{self.inner}".'
            )
        return self.inner
