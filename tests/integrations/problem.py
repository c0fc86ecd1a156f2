"""A small model and data that all frameworks train."""

from __future__ import annotations

import torch
from torch import nn

FEATURES, BATCH = 6, 4

LOSSLESS = "bsp / all_reduce / none / fusion(25MiB)"


class Model(nn.Module):
    """A network with batch normalization, whose statistics are buffers; returns its loss as Trainer wants it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        predicted = self.layers(x)[:, 0]
        return {"loss": (predicted - labels).square().mean(), "logits": predicted}


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random rows with labels that a network can learn."""

    def __init__(self, size: int, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._x = torch.randn(size, FEATURES, generator=generator)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = self._x[index]
        return {"x": x, "labels": x[:2].sum().sin()}


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of all parameters and buffers."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """The largest difference of two models."""
    assert first.keys() == second.keys()
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


def said(error: BaseException) -> str:
    """The error as a user reads it."""
    return f"{type(error).__name__}: {error}"
