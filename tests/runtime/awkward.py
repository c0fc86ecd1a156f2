"""Models and schedules that the tests of awkward training share."""

from __future__ import annotations

import pytest
import torch
from torch import nn

SCHEDULES = ["sequential", "wfbp", "fusion", "fusion(100B, 50B)"]
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


def strategy(schedule: str) -> str:
    return f"bsp / all_reduce / none / {schedule}"


class Branches(nn.Module):
    """Three branches of which a forward pass uses some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(5, 4)
        self.left = nn.Linear(4, 3)
        self.right = nn.Linear(4, 3)
        self.never = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor, branches: str) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(inputs))
        used = {"l": self.left, "r": self.right}
        return sum((used[name](hidden) for name in branches), torch.zeros(4, 3) + hidden.sum())


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.BatchNorm2d(2)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)
