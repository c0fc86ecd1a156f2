"""A small residual CNN with batch normalisation for images of any size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from laconic.errors import UsageError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class CnnShape:
    """The size of a CNN: the channels of each stage; every stage but the first halves the image."""

    stages: tuple[int, ...]
    blocks: int
    """Residual blocks per stage."""


CNN_SHAPES: dict[str, CnnShape] = {
    "tiny": CnnShape(stages=(16, 32), blocks=1),
    "small": CnnShape(stages=(32, 64, 128), blocks=1),
    "medium": CnnShape(stages=(64, 128, 256), blocks=2),
}
"""About 0.02 M, 0.3 M and 2.8 M parameters."""


def cnn_shape(name: str) -> CnnShape:
    """The shape called `name`."""
    if name not in CNN_SHAPES:
        raise UsageError(f'there is no CNN of size "{name}". {did_you_mean(name, CNN_SHAPES)}')
    return CNN_SHAPES[name]


class SmallCnn(nn.Module):
    """Logits for the classes of an image."""

    def __init__(self, shape: CnnShape, *, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, shape.stages[0], 3, padding=1, bias=False)
        width = shape.stages[0]
        blocks: list[nn.Module] = []
        for stage, stage_width in enumerate(shape.stages):
            for block in range(shape.blocks):
                blocks.append(_Block(width, stage_width, stride=2 if stage and not block else 1))
                width = stage_width
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, channels, height, width) to (batch, classes)."""
        hidden = functional.relu(self.norm(self.blocks(self.stem(images))))
        return self.head(hidden.mean(dim=(2, 3)))


class _Block(nn.Module):
    def __init__(self, width: int, out_width: int, *, stride: int) -> None:
        super().__init__()
        self.norm_1 = nn.BatchNorm2d(width)
        self.conv_1 = nn.Conv2d(width, out_width, 3, stride=stride, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(out_width)
        self.conv_2 = nn.Conv2d(out_width, out_width, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(width, out_width, 1, stride=stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.conv_1(functional.relu(self.norm_1(images)))
        return self.shortcut(images) + self.conv_2(functional.relu(self.norm_2(hidden)))
