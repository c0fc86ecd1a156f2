"""What the ranks of tests/runtime/test_shard_corners.py do: 4 processes."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import laconic
from laconic.errors import AttachError, CheckpointError
from tests.processes import gloo_group
from tests.runtime.shard_models import gpt_loss, make_mesh, pieces_of, sharded_gpt, train


class _Scaled(nn.Module):
    """A vector of one row, which is empty on the second shard, and may be left out of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(1, 6))
        self.last = nn.Linear(6, 6)
        self.scaled = True

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        return self.last(hidden * self.scale if self.scaled else hidden)


def unused_in_one_replica(strategies: list[str]) -> dict[str, list[bool]]:
    """Whether each step left a gradient of the vector, on every rank the same; one replica, or both, leave it out."""
    from torch.distributed.fsdp import fully_shard

    with gloo_group():
        mesh, found = make_mesh(), dict[str, list[bool]]()
        replica = mesh["replicate"].get_local_rank()
        for strategy in strategies:
            torch.manual_seed(0)
            model = _Scaled()
            fully_shard(model, mesh=mesh["shard"])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            found[strategy] = []
            with laconic.attach(model, optimizer, strategy, process_group=mesh["replicate"], timeout_s=20):
                for left_out_by in ((), (1,), (0, 1), ()):
                    model.scaled = replica not in left_out_by
                    model(torch.randn(3, 6)).square().mean().backward()
                    found[strategy].append(model.scale.grad is not None)
                    for parameter in model.parameters():
                        if parameter.grad is not None:
                            parameter.grad.full_tensor()  # a collective of the shard group
                    optimizer.step()
                    optimizer.zero_grad()
        return found


def differing_by_shard() -> dict[str, Any]:
    """What ranks say that differ only from those with the other shards, and how long it takes."""
    with gloo_group():
        mesh, found, rank = make_mesh(), dict[str, Any](), dist.get_rank()
        plain = "bsp / all_reduce / none"
        other = "diloco(period=2)" if rank % 2 else plain

        def before() -> tuple[nn.Module, torch.optim.Optimizer]:
            from torch.distributed.fsdp import fully_shard

            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            fully_shard(model, mesh=mesh["shard"])
            return model, optimizer

        def spoilt() -> tuple[nn.Module, torch.optim.Optimizer]:
            model, optimizer = sharded_gpt(mesh["shard"])
            if rank == 3:
                for group in optimizer.param_groups:
                    group["lr"] = 1.0
            return model, optimizer

        for name, make, strategy, group in (
            ("another strategy", lambda: sharded_gpt(mesh["shard"]), other, mesh["replicate"]),
            ("another optimizer", spoilt, plain, mesh["replicate"]),
            ("made before", before, plain, mesh["replicate"]),
            ("made before, inside", before, "bsp / sharded", mesh["shard"]),
            ("a name", lambda: sharded_gpt(mesh["shard"]), plain, "replicate"),
        ):
            model, optimizer = make()
            began_s = time.monotonic()
            try:
                laconic.attach(model, optimizer, strategy, process_group=group, timeout_s=20).detach()
                said = "nothing"
            except AttachError as exc:
                said = str(exc)
            found[name] = (said, time.monotonic() - began_s)
            dist.barrier()
        return found


def evaluated(strategy: str) -> dict[str, bool]:
    """Whether evaluations in inference mode leave training and losses as those under no_grad() do."""
    from torch.distributed.device_mesh import init_device_mesh

    with gloo_group():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
        ends: list[tuple[dict[str, torch.Tensor], list[float]]] = []
        for mode in (torch.no_grad, torch.inference_mode):
            model, optimizer = sharded_gpt(mesh)
            losses: list[float] = []
            with laconic.attach(model, optimizer, strategy, process_group=mesh["shard"], timeout_s=20):
                for step in range(2):
                    train(model, optimizer, gpt_loss, range(step, step + 1))
                    model.eval()
                    with mode():
                        losses.append(gpt_loss(model, step, 0).item())
                    model.train()
            for part in model.modules():
                getattr(part, "reshard", lambda: None)()
            ends.append((pieces_of(model), losses))
        (first, said), (second, again) = ends
        return {
            "losses": said == again,
            "parameters": all(torch.equal(first[name], second[name]) for name in first),
        }


def resumed_from_one_copy(folder: str) -> dict[str, str]:
    """What every rank says when it loads a model that torch.distributed.checkpoint saved once for all replicas."""
    import torch.distributed.checkpoint as dcp

    with gloo_group():
        mesh, found = make_mesh(), dict[str, str]()
        options: dict[str, Any] = {"process_group": mesh["replicate"], "timeout_s": 20}
        for name in ("between rounds", "averaged"):
            model, optimizer = sharded_gpt(mesh["shard"])
            with laconic.attach(model, optimizer, "diloco(period=4)", **options) as session:
                train(model, optimizer, gpt_loss, range(6))
                if name == "averaged":
                    session.average()
                state = {"session": session.state_dict(), "model": model.state_dict()}
                dcp.save(state, checkpoint_id=f"{folder}/{name}")
            model, optimizer = sharded_gpt(mesh["shard"])
            with laconic.attach(model, optimizer, "diloco(period=4)", **options) as session:
                loaded = {"model": model.state_dict()}
                dcp.load(loaded, checkpoint_id=f"{folder}/{name}")
                model.load_state_dict(loaded["model"])
                try:
                    session.load_checkpoint(f"{folder}/{name}")
                    found[name] = "loaded"
                except CheckpointError as exc:
                    found[name] = str(exc)
        return found
