"""Sharded models that tests train: a GPT and a model whose shards are uneven, on 2 islands of 2 shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from laconic.experiments.small_gpt import GptShape, SmallGpt

_SHAPE = GptShape(layers=2, width=32, heads=2, context=12, vocabulary=61)


def make_mesh(replicas: int = 2, device: str = "cpu") -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(
        device, (replicas, dist.get_world_size() // replicas), mesh_dim_names=("replicate", "shard")
    )


def sharded_gpt(mesh: Any, **settings: Any) -> tuple[SmallGpt, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = SmallGpt(_SHAPE).to(mesh.device_type)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


class Uneven(nn.Module):
    """Shards of 14 and 13 rows, of one row and none, and of a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 27)
        self.second = nn.Linear(27, 1)
        self.last = nn.Linear(1, 6, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(inputs).relu()))


def sharded_uneven(mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = Uneven()
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def gpt_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    tokens = torch.randint(61, (2, 13), generator=torch.Generator().manual_seed(1000 * step + rank))
    tokens = tokens.to(next(model.parameters()).device)
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def uneven_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    inputs = torch.randn(3, 24, generator=torch.Generator().manual_seed(1000 * step + rank))
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


Loss = Callable[[nn.Module, int, int], torch.Tensor]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, steps: range, *, clip: bool = False) -> None:
    for step in steps:
        loss(model, step, dist.get_rank()).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def pieces_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach()._local_tensor.clone() for name, parameter in model.named_parameters()}
