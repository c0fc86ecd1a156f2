"""Randomized Hadamard transforms by plain torch."""

from __future__ import annotations

import torch

from laconic.compression.wire.rotation import Rotation
from laconic.compression.wire.seeds import mix_tensor


def sums_of_squares(flat: torch.Tensor, rotation: Rotation, squares: torch.Tensor) -> None:
    """Fill `squares` with the sum of each block."""
    for length, blocks, _ in rotation.by_length:
        squares[blocks] = flat[_places(rotation, length, blocks)].float().double().square().sum(1)


def forward(flat: torch.Tensor, rotation: Rotation, seed: int, rotated: torch.Tensor) -> None:
    """Fill `rotated`."""
    signed = flat.float() * _signs(rotation, seed)
    for length, blocks, _ in rotation.by_length:
        places = _places(rotation, length, blocks)
        rotated[places] = _hadamard(signed[places])


def backward(values: torch.Tensor, rotation: Rotation, seed: int, out: torch.Tensor) -> None:
    """Fill `out` with every block rotated back."""
    signs = _signs(rotation, seed)
    for length, blocks, _ in rotation.by_length:
        places = _places(rotation, length, blocks)
        out[places] = (_hadamard(values[places]) * signs[places]).to(out.dtype)


def _signs(rotation: Rotation, seed: int) -> torch.Tensor:
    """+1 or -1 for every element: bit i % 32 of the random number i // 32 of its block decides."""
    chunk = rotation.chunk_of_element()
    position = torch.arange(rotation.bucket.numel, device=rotation.bucket.device) - rotation.starts_tensor[chunk]
    numbers = mix_tensor(position // 32 + mix_tensor(rotation.seeds_tensor ^ seed)[chunk])
    return (1 - 2 * ((numbers >> position % 32) & 1)).float()


def _places(rotation: Rotation, length: int, blocks: torch.Tensor) -> torch.Tensor:
    """The elements of some blocks of one length, a row for each block."""
    return rotation.starts_tensor[blocks][:, None] + torch.arange(length, device=blocks.device)


def _hadamard(rows: torch.Tensor) -> torch.Tensor:
    """The orthonormal Hadamard transform of every row."""
    length = rows.shape[1]
    half = 1
    while half < length:
        pairs = rows.view(-1, 2, half)
        rows = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), 1)
        half *= 2
    return rows.reshape(-1, length) * length**-0.5
