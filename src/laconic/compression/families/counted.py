"""The base of sparsifiers whose number of entries depends on the values: counts are sent first, then entries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.contract import Compressor
from laconic.compression.traits import Traits, computed_once
from laconic.compression.wire.indices import CODINGS, decode_indices, encode_indices, indices_bytes
from laconic.core.exchange import Exchange, Group, Round
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.transport import DoneWork
from laconic.settings import choice


@dataclass(frozen=True, kw_only=True)
class CountedEntries(Compressor):
    """Send the entries that `choose` returns, their values as float32; the others arrive as zero.

    A first round exchanges the number of entries of each rank, a second gathers payloads padded to the longest.
    """

    family: ClassVar[str] = "sparsification"

    indices: str = choice("auto", *CODINGS)
    """How the positions of the entries are coded; auto takes the coding with the fewest bytes."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """The number of bytes depends on the values of all ranks."""
        return replace(super().traits, decodes_alone=False, payloads_add_up=False, exact_bytes=False)

    def choose(self, flat: torch.Tensor, state: BucketState) -> tuple[torch.Tensor, torch.Tensor]:
        """The entries of `flat` to send: ascending positions in the bucket, and values; may update `state`."""
        raise NotImplementedError

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """The counts, and at most every entry with its position."""
        if bucket.numel == 0:
            return ()
        # Bytes grow with the count, but when all entries are sent their positions need none.
        most = max(self._bytes(bucket.numel, count) for count in (bucket.numel - 1, bucket.numel))
        return Round("gather", (4,)), Round("gather", (most,))

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """Gather the counts, then the entries."""
        numel = flat.numel()
        if numel == 0:
            return
        indices, chosen = self.choose(flat, state)
        values = chosen.to(torch.float32)
        if own is not None:
            own.zero_()
            own[indices] = values.to(own.dtype)
        work, gathered = group.gather(torch.tensor([indices.numel()], dtype=torch.int32, device=flat.device))
        yield work
        # On a GPU the host waits here: it must know how much to send.
        counts: list[int] = gathered.view(-1).tolist()
        sizes = [self._bytes(numel, count) for count in counts]
        total = torch.zeros(numel, dtype=torch.promote_types(flat.dtype, torch.float32), device=flat.device)
        if not max(counts):
            yield DoneWork()
        else:
            row = torch.zeros(max(sizes), dtype=torch.uint8, device=flat.device)
            row[: sizes[group.rank]] = torch.cat(
                (encode_indices(indices, numel, self.indices), values.view(torch.uint8))
            )
            work, rows = group.gather(row)
            yield work
            for received, count, size in zip(rows, counts, sizes, strict=True):
                split = size - 4 * count
                places = decode_indices(received[:split], numel, count, self.indices)
                total[places] += received[split:size].view(torch.float32).to(total.dtype)
        flat.copy_(total)

    def _bytes(self, numel: int, count: int) -> int:
        return indices_bytes(numel, count, self.indices) + 4 * count
