"""What the ranks of tests/runtime/test_shard_corners.py do: 4 processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import laconic
from laconic.errors import AttachError, CheckpointError, LaconicError
from laconic.runtime import other_shards, usage
from laconic.runtime.digest import piece_digest
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


def unused_in_one_replica(strategies: list[str]) -> dict[str, Any]:
    """Whether each step left a gradient of the vector, on every rank the same; one replica, or both, leave it out.

    Also how often each rank has read an answer of the previous pass, which makes it wait for the device.
    """
    from torch.distributed.fsdp import fully_shard

    real, num_read = usage._Question.someone_used_all, [0]

    def counted(question: usage._Question) -> bool:
        num_read[0] += 1
        return real(question)

    usage._Question.someone_used_all = counted  # type: ignore[method-assign]
    with gloo_group():
        mesh, found, read = make_mesh(), dict[str, list[bool]](), dict[str, int]()
        replica = mesh["replicate"].get_local_rank()
        for strategy in strategies:
            torch.manual_seed(0)
            model = _Scaled()
            fully_shard(model, mesh=mesh["shard"])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            found[strategy] = []
            num_read[0] = 0
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
            read[strategy] = num_read[0]
        return {"gradients": found, "answers read": read}


def differing_by_shard() -> dict[str, Any]:
    """What ranks say that differ only from those with the other shards, and how long it takes."""
    with gloo_group():
        mesh, found, rank = make_mesh(), dict[str, Any](), dist.get_rank()
        odd, plain = rank % 2 == 1, "bsp / all_reduce / none"
        between, half = mesh["replicate"], dist.new_group([0, 2])

        def gpt() -> tuple[nn.Module, torch.optim.Optimizer]:
            return sharded_gpt(mesh["shard"])

        def before() -> tuple[nn.Module, torch.optim.Optimizer]:
            """Odd ranks make the optimizer before the model is sharded."""
            from torch.distributed.fsdp import fully_shard

            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            fully_shard(model, mesh=mesh["shard"])
            return model, optimizer if odd else torch.optim.SGD(model.parameters(), lr=0.1)

        def with_rate(spoilt: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
            model, optimizer = gpt()
            if spoilt:
                for group in optimizer.param_groups:
                    group["lr"] = 1.0
            return model, optimizer

        def frozen() -> tuple[nn.Module, torch.optim.Optimizer]:
            model, optimizer = gpt()
            next(model.parameters()).requires_grad_(not odd)
            return model, optimizer

        cases: dict[str, tuple[Callable[[], Any], str, Any, dict[str, Any]]] = {
            "another strategy": (gpt, "diloco(period=2)" if odd else plain, between, {}),
            "a strategy with a typo": (gpt, "bps" if odd else plain, between, {}),
            "another optimizer": (lambda: with_rate(rank == 3), plain, between, {}),
            "another learning rate": (lambda: with_rate(odd), plain, between, {}),
            "another learning rate, local updates": (lambda: with_rate(odd), "local_sgd(period=2)", between, {}),
            "another learning rate, inside": (lambda: with_rate(odd), "bsp / sharded", mesh["shard"], {}),
            "unused parameters": (gpt, plain, between, {"find_unused_parameters": False if odd else None}),
            "frozen": (frozen, plain, between, {}),
            "made before": (before, plain, between, {}),
            "made before, inside": (before, "bsp / sharded", mesh["shard"], {}),
            "a name": (gpt, plain, "replicate" if odd else between, {}),
            "a group of others": (gpt, plain, half, {}),
            "nothing": (gpt, plain, between, {}),
            "taken over": (lambda: with_rate(rank == 3), plain, between, {"sync_optimizer": True}),
        }
        for name, (make, strategy, group, settings) in cases.items():
            model, optimizer = make()
            began_s = time.monotonic()
            try:
                laconic.attach(model, optimizer, strategy, process_group=group, timeout_s=20, **settings).detach()
                said = "attached"
            except LaconicError as exc:
                said = f"{type(exc).__name__}: {exc}"
            found[name] = (said, time.monotonic() - began_s)
            dist.barrier()
        return found


def on_two_meshes(late_s: float) -> dict[str, tuple[str, float]]:
    """What ranks say of which rank 0 cannot attach, with norms on one dimension of a mesh and weights on both."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    other_shards._LAST_VOTE_S = late_s / 4
    with gloo_group():
        rank, found = dist.get_rank(), dict[str, tuple[str, float]]()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        parameters = {
            "norm": distribute_tensor(torch.ones(4), mesh["shard"], [Shard(0)]),
            "weight": distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)]),
        }
        same = dict.fromkeys(other_shards.SETTINGS, "same")
        for name, fails, differs, wait_s in (
            ("one fails", rank == 0, False, 0.0),
            ("one differs", False, rank == 3, 0.0),
            ("the others are late", rank == 0, False, late_s if rank else 0.0),
            ("all attach", False, False, 0.0),
        ):
            late = name == "the others are late"
            time.sleep(wait_s)
            began_s = time.monotonic()
            try:
                with other_shards.attached_alike(parameters) as attaching:
                    if not late:
                        attaching.checked(timeout_s=20)
                    if fails:
                        raise AttachError("a problem of its own")
                    if late:
                        attaching.checked(timeout_s=20)
                    attaching.agree(same | ({"strategy": "another"} if differs else {}), timeout_s=20)
                said = "attached"
            except LaconicError as exc:
                said = f"{type(exc).__name__}: {exc}"
            found[name] = (said, time.monotonic() - began_s)
            dist.barrier()
        return found


def checksums_of_shards() -> dict[str, bool]:
    """Whether checksums do not depend on how parameters are sharded, and depend on the positions of values."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with gloo_group():
        flat = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        whole = torch.randn(7, 6, 2, generator=torch.Generator().manual_seed(0))

        def of(parameters: dict[str, torch.Tensor]) -> list[int]:
            return other_shards.whole_digests(parameters, timeout_s=20)

        def sharded(values: torch.Tensor) -> list[list[int]]:
            return [
                of({"": distribute_tensor(values, mesh, places)})
                for mesh, places in (
                    (flat, [Shard(0)]),
                    (flat, [Shard(1)]),
                    (flat, [Replicate()]),
                    (grid, [Shard(0), Shard(1)]),
                    (grid, [Shard(2), Shard(1)]),
                    (grid, [Replicate(), Shard(0)]),
                    (grid, [Shard(0), Shard(0)]),
                    (grid["tp"], [Shard(0)]),
                )
            ]

        expected = [int(piece_digest(whole, whole.shape, (0, 0, 0)))]
        order = torch.tensor([1, 0, 2, 3, 4, 5, 6])

        def both_ways() -> bool:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
            plain = [int(piece_digest(p, p.shape, [0] * p.ndim)) for p in model.parameters()]
            parallelize_module(model, grid["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
            fully_shard(model, mesh=grid["shard"])
            return of(dict(model.named_parameters())) == plain

        even = distribute_tensor(whole[:4], flat, [Shard(0)])
        swapped = distribute_tensor(whole[:4][[1, 0, 2, 3]], flat, [Shard(0)])
        return {
            "sharded alike": all(one == expected for one in sharded(whole)),
            "rows permuted": all(one != expected for one in sharded(whole[order])),
            "shards swapped": of({"": even}) != of({"": swapped}),
            "both ways": both_ways(),
            "plain ones": of({"shard": even, "plain": whole}) != of({"shard": even, "plain": whole[order]}),
        }


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


def not_together() -> dict[str, str]:
    """What ranks say that are in different operations, or whose partner has ended early; replicas of one rank."""
    with gloo_group():
        mesh, rank, found = make_mesh(), dist.get_rank(), dict[str, str]()
        for name in ("operations", "steps"):
            model, optimizer = sharded_gpt(mesh["shard"])
            session = laconic.attach(
                model, optimizer, "bsp / all_reduce / none", process_group=mesh["replicate"], timeout_s=3
            )
            try:
                with session:
                    if name == "steps":
                        train(model, optimizer, gpt_loss, range(1 + rank))
                    elif rank == 0:
                        session.average()
                    else:
                        session.consensus_distance()
                found[name] = "nothing"
            except LaconicError as exc:
                found[name] = str(exc)
            dist.barrier()
        return found
