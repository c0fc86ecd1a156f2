"""What a compressor puts on the wire for one bucket."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Payload:
    """The tensors of one encoded bucket; their bytes are the bytes sent, nothing else is."""

    tensors: tuple[torch.Tensor, ...]

    def row(self, number: int) -> Payload:
        """One of several payloads that are stacked: each tensor has a row for each of them."""
        return Payload(tuple(tensor[number] for tensor in self.tensors))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)
