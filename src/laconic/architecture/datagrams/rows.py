"""How the values of a sum lie in rows: each row fills one frame, and each rank owns the same number of rows.

    P = ceil(numel / n)              values that a rank owns
    R = max(1, ceil(P / most))       rows of a rank; most = 1440 bytes / bytes of a value
    W = ceil(P / R)                  values of a row, so that fewer than R values per rank are padding

Row i of all n R rows belongs to rank i mod n. Neighbouring rows go to different ranks, so a rank that sends them in
order keeps no single receiver busy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from laconic.core.sent_bytes import all_gather_sent, shard_exchange_sent

ROW_BYTES = 1440
"""Values of one frame: with a header of 32 bytes and those of UDP and IP exactly an Ethernet packet of 1500 bytes."""


@dataclass(frozen=True)
class Rows:
    """The shape in which this many values travel."""

    numel: int
    world_size: int
    item_bytes: int

    @property
    def _owned(self) -> int:
        return -(-self.numel // self.world_size)

    @property
    def num_rows(self) -> int:
        """Rows that each rank owns."""
        return max(1, -(-self._owned // (ROW_BYTES // self.item_bytes)))

    @property
    def width(self) -> int:
        """Values of a row."""
        return -(-self._owned // self.num_rows)

    @property
    def owned_bytes(self) -> int:
        """Bytes of the rows that each rank owns."""
        return self.num_rows * self.width * self.item_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.world_size * self.owned_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes one rank sends: rows to the ranks that own them, and the means of its own rows to all others."""
        if self.world_size == 1:
            return 0
        return shard_exchange_sent(self.nbytes, self.world_size) + all_gather_sent(self.owned_bytes, self.world_size)

    def cut(self, flat: torch.Tensor) -> torch.Tensor:
        """`flat` as a table of rows, zeros at its end."""
        padded = flat.new_zeros(self.world_size * self.num_rows * self.width)
        padded[: self.numel] = flat
        return padded.view(-1, self.width)

    def by_owner(self, table: torch.Tensor) -> torch.Tensor:
        """The rows of each rank, rank by rank."""
        return table.view(self.num_rows, self.world_size, self.width).transpose(0, 1).contiguous()

    def in_order(self, owned: torch.Tensor) -> torch.Tensor:
        """The table of rows, from `by_owner`."""
        return owned.transpose(0, 1).reshape(-1, self.width)
