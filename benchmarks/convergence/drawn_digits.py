"""Images of digits, drawn here: no download and no package is needed, and every machine draws the same."""

from __future__ import annotations

from functools import cache

import torch

_NUMBER = 4000
_SIDE = 8
_NOISE = 0.4
"""Standard deviation, where strokes are 1 and paper is 0."""
_SEED = 2026
_FONT = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111",
    "01110 10001 00001 00110 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
"""Seven rows of five dots for each digit."""


@cache
def drawn_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images, (number, 1, 8, 8) with mean 0 and variance 1, and their labels.

    Each digit lies at a random place, one stroke dot in ten is missing, its contrast varies by a half, and there is
    noise.
    """
    generator = torch.Generator().manual_seed(_SEED)
    font = torch.tensor([[[float(dot) for dot in row] for row in glyph.split()] for glyph in _FONT])
    labels = torch.randint(len(_FONT), (_NUMBER,), generator=generator)
    rows, columns = font.shape[1:]
    tops = torch.randint(_SIDE - rows + 1, (_NUMBER,), generator=generator)
    lefts = torch.randint(_SIDE - columns + 1, (_NUMBER,), generator=generator)
    glyphs = font[labels] * (torch.rand(_NUMBER, rows, columns, generator=generator) > 0.1)
    glyphs = glyphs * (0.75 + 0.5 * torch.rand(_NUMBER, 1, 1, generator=generator))
    images = _NOISE * torch.randn(_NUMBER, 1, _SIDE, _SIDE, generator=generator)
    for image, glyph, top, left in zip(images, glyphs, tops.tolist(), lefts.tolist(), strict=True):
        image[0, top : top + rows, left : left + columns] += glyph
    return (images - images.mean()) / images.std(), labels
