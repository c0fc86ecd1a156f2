"""What real processes do in the tests of changed strategies: called by run_processes on every rank."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn

import laconic
from laconic.errors import PeerLost
from tests.processes import gloo_group
from tests.runtime.replicas import mlp, mlp_loss, snapshot

DDP = "bsp / all_reduce / none / fusion"
DILOCO = "streaming_diloco(period=4, fragments=2, overlap=1) / all_reduce / int4 + error_feedback"


def _optimizers(model: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    if kind == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr=0.01)]
    matrices, vectors = ([p for p in model.parameters() if (p.dim() == 2) is flat] for flat in (True, False))
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=0.01)]


def _steps(model: nn.Module, optimizers: list[torch.optim.Optimizer], rank: int, numbers: range) -> None:
    for step in numbers:
        mlp_loss(model, step, rank).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _everything(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Parameters, and what optimizers keep of them."""
    found = snapshot(model)
    for number, optimizer in enumerate(optimizers):
        for place, fields in optimizer.state_dict()["state"].items():
            found |= {f"{key} of {place} in {number}": torch.as_tensor(value).clone() for key, value in fields.items()}
    return found


def there_and_back() -> dict[str, dict[str, dict[str, torch.Tensor]]]:
    """From DDP to local updates, in the middle of whose rounds back to DDP."""
    results: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
    with gloo_group():
        rank = torch.distributed.get_rank()
        for kind in ("adamw", "muon"):
            model = mlp()
            optimizers = _optimizers(model, kind)
            with laconic.attach(model, optimizers, DDP) as session:
                _steps(model, optimizers, rank, range(3))
                session.change_strategy(DILOCO)
                _steps(model, optimizers, rank, range(3, 13))
                alone = snapshot(model)
                session.change_strategy(DDP)
                returned = _everything(model, optimizers)
                _steps(model, optimizers, rank, range(13, 16))
            results[kind] = {"alone": alone, "returned": returned, "later": _everything(model, optimizers)}
    return results


class Dying(nn.Module):
    """Ends its process in a forward pass once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.dies = False

    def forward(self, batch: torch.Tensor) -> Any:
        if self.dies:
            os._exit(9)
        return self.inner(batch)


def dies_after_change() -> list[tuple[str, float]]:
    """Rank 1 dies in the forward pass right after the change; what rank 0 is told, and after how long."""
    with gloo_group():
        rank = torch.distributed.get_rank()
        model = Dying()
        optimizers = _optimizers(model, "adamw")
        session = laconic.attach(model, optimizers, DDP, timeout_s=60)
        _steps(model, optimizers, rank, range(3))
        session.change_strategy(DILOCO)
        model.dies = rank == 1
        began_s = time.monotonic()
        try:
            while time.monotonic() - began_s < 60:
                _steps(model, optimizers, rank, range(1))
        except PeerLost as error:
            return [(str(error), time.monotonic() - began_s)]
        finally:
            session.detach()
    return []
