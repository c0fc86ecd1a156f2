"""What ranks of the GPU tests do: several processes on one GPU, over NCCL."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.compression import NoCompression
from laconic.core.exchange import Exchange, Group
from laconic.core.stateful import BucketState
from laconic.strategy import Strategy

STEPS = 8
FAMILIES = {
    "gradients": "bsp / all_reduce / none / fusion(bytes=64KiB, first_bytes=16KiB)",
    "wfbp": "bsp / all_reduce / none / wfbp",
    "priority": "bsp / all_reduce / none / priority(partition_bytes=64KiB)",
    "dear": "bsp / all_reduce / none / dear(bytes=64KiB)",
    "lossy": "bsp / all_reduce / int8 + error_feedback / fusion",
    "local updates": "diloco(period=3) / all_reduce / int4 + error_feedback",
    "streaming": "streaming_diloco(period=4, fragments=2, overlap=1)",
    "gossip": "bsp / gossip",
    "servers": "bsp / parameter_server",
    "async servers": "asp / parameter_server",
    "async pairs": "asp / gossip",
}
OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "fused adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
}


@dataclass(frozen=True, kw_only=True)
class Late(NoCompression):
    """Lets the device wait before every sum: whoever reads the result too early sees what was there before."""

    name: ClassVar[str] = "late"

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        torch.cuda._sleep(200_000_000)
        yield from super().exchange(flat, state, group, own)


def nccl_group() -> None:
    """Different host ids make NCCL take ranks on one GPU for ranks on different hosts."""
    rank = os.environ["RANK"]
    os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 8)).cuda()


def loss(replica: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return replica(torch.randn(16, 32, generator=generator).cuda()).square().mean()


def train(replica: nn.Module, forward: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The gradients of every step, as seen right after the backward pass, on the host."""
    seen: list[torch.Tensor] = []
    for step in range(STEPS):
        loss(forward, step).backward()
        seen.append(torch.cat([p.grad.flatten() + 0 for p in replica.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    return [gradients.cpu() for gradients in seen]


def snapshot(replica: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in replica.state_dict().items()}


def every_family() -> dict[str, dict[str, object]]:
    """Each family with each optimizer, beside DDP with the same one."""
    nccl_group()
    original = model()
    found: dict[str, dict[str, object]] = {}
    for name, make in OPTIMIZERS.items():
        replica = copy.deepcopy(original)
        train(replica, DistributedDataParallel(replica, device_ids=[0]), make(replica.parameters()))
        found[f"ddp, {name}"] = {"model": snapshot(replica)}
        for family, text in FAMILIES.items():
            if family.startswith("async servers") and name == "fused adamw":
                continue
            replica = copy.deepcopy(original)
            optimizer = make(replica.parameters())
            with laconic.attach(replica, optimizer, text, timeout_s=60) as session:
                train(replica, replica, optimizer)
                steps = session.step
                if not session.strategy.exchanges_gradients():
                    session.average()
            found[f"{family}, {name}"] = {"model": snapshot(replica), "steps": steps}
    dist.destroy_process_group()
    return found


def late_sums_on_a_ddp_model() -> dict[str, list[torch.Tensor]]:
    """Gradients of a DDP model right after the backward pass, where the device is late with every sum."""
    nccl_group()
    found: dict[str, list[torch.Tensor]] = {}
    for kind in ("ddp", "laconic on ddp", "laconic"):
        replica = model()
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.05)
        wrapped = DistributedDataParallel(replica, device_ids=[0]) if "ddp" in kind else replica
        if kind == "ddp":
            found[kind] = train(replica, wrapped, optimizer)
            continue
        with laconic.attach(wrapped, optimizer, Strategy(compression=Late()), timeout_s=60):
            found[kind] = train(replica, wrapped, optimizer)
    dist.destroy_process_group()
    return found


def with_grad_scaler() -> dict[str, dict[str, object]]:
    """A GradScaler whose scale moves, with one rank that overflows: bsp and local updates."""
    nccl_group()
    found: dict[str, dict[str, object]] = {}
    for text in ("bsp / all_reduce / topk(density=0.1) + error_feedback", "diloco(period=2)"):
        for fused in (False, True):
            replica = model()
            optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-2, fused=fused)
            scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2)
            with laconic.attach(replica, optimizer, text, timeout_s=60) as session:
                for step in range(STEPS):
                    scaled = scaler.scale(loss(replica, step))
                    if step == 3 and dist.get_rank() == 1:
                        scaled = scaled * float("inf")
                    scaled.backward()
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                session.average()
            found[f"{text}, fused={fused}"] = {"model": snapshot(replica)}
    dist.destroy_process_group()
    return found


BESIDE = (
    "bsp / all_reduce / none / wfbp",
    "bsp / all_reduce / int8 / fusion(bytes=4MiB)",
    "bsp / all_reduce / none / dear(bytes=4MiB)",
    "bsp / all_reduce / none / priority(partition_bytes=1MiB)",
    "delayed / all_reduce / int4 + error_feedback",
    "streaming_diloco(period=4) / all_reduce / int4 + error_feedback",
)
"""Strategies whose exchanges are in flight while the script runs collectives of its own."""


def beside_collectives_of_the_script() -> dict[str, float]:
    """Train with SyncBatchNorm, and average the loss over all ranks in every step; the last mean of each strategy."""
    nccl_group()
    losses: dict[str, float] = {}
    for strategy in BESIDE:
        torch.manual_seed(0)
        layers = [part for _ in range(2) for part in (nn.Linear(1024, 1024), nn.BatchNorm1d(1024), nn.GELU())]
        replica = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(*layers)).cuda()
        optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-3)
        with laconic.attach(replica, optimizer, strategy, timeout_s=60, total_steps=12):
            for step in range(12):
                generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
                value = replica(torch.randn(64, 1024, generator=generator).cuda()).square().mean()
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
                mean = value.detach().clone()
                dist.all_reduce(mean)
                losses[strategy] = mean.item() / dist.get_world_size()
    dist.destroy_process_group()
    return losses
