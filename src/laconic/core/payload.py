"""The data that a compressor puts on the wire for one bucket."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Payload:
    """The tensors of one encoded bucket; exactly their bytes are sent."""

    tensors: tuple[torch.Tensor, ...]

    def row(self, number: int) -> Payload:
        """One of several stacked payloads: each tensor has one row per payload."""
        return Payload(tuple(tensor[number] for tensor in self.tensors))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)
