"""What the ranks of the tests of sharded models do: 4 processes, 2 islands of 2 shards."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import laconic
from laconic.errors import AttachError, LaconicWarning
from laconic.runtime.shards import fsdp_modules
from tests.processes import gloo_group
from tests.runtime.gpu_ranks import nccl_group
from tests.runtime.shard_models import (
    Uneven,
    gpt_loss,
    make_mesh,
    pieces_of,
    sharded_gpt,
    sharded_uneven,
    train,
    uneven_loss,
)

SCHEDULES = ("sequential", "wfbp", "fusion", "fusion(64KiB)", "mg_wfbp")


def equal_to_native_over_nccl(steps: int) -> dict[str, bool]:
    """The same with all ranks on one GPU."""
    nccl_group()
    try:
        return _equal_to_native(make_mesh(device="cuda"), steps)
    finally:
        dist.destroy_process_group()


def equal_to_native(steps: int) -> dict[str, bool]:
    """Which ways of training come to the same bits as PyTorch's own HSDP."""
    with gloo_group():
        return _equal_to_native(make_mesh(), steps)


def _equal_to_native(mesh: Any, steps: int) -> dict[str, bool]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    found: dict[str, bool] = {}
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, settings in (
        ("fp32", {}),
        ("bf16", {"mp_policy": mixed}),
        ("kept", {"reshard_after_forward": False}),
    ):
        model, optimizer = sharded_gpt(mesh, **settings)
        train(model, optimizer, gpt_loss, range(steps), clip=True)
        native = pieces_of(model)
        for schedule in SCHEDULES if name == "fp32" else ("fusion", "wfbp"):
            model, optimizer = sharded_gpt(mesh["shard"], **settings)
            with laconic.attach(
                model,
                optimizer,
                f"bsp / all_reduce / none / {schedule}",
                process_group=mesh["replicate"],
                timeout_s=40,
            ) as session:
                train(model, optimizer, gpt_loss, range(steps), clip=True)
                ends = {bucket.tensors[-1].ready_with for bucket in session.plan.buckets}
            pieces = pieces_of(model)
            found[f"{name} {schedule}"] = all(torch.equal(native[key], pieces[key]) for key in native)
            if schedule.startswith("fusion"):
                found[f"{name} {schedule} buckets end with parts"] = ends == {"blocks.0", "blocks.1", "the model"}
                alike = [len({t.ready_with for t in bucket.tensors}) for bucket in session.plan.buckets]
                found[f"{name} {schedule} no bucket spans parts"] = set(alike) == {1}
    found["accumulated"] = _accumulated(mesh)
    found["hooks of the user"] = _with_hooks(mesh)
    found["average after an evaluation"] = _averaged_after_evaluation(mesh)
    return found


def _accumulated(mesh: Any) -> bool:
    """Two passes, of which one is exchanged; after an evaluation, which leaves the outermost module unsharded."""
    rank = dist.get_rank()
    model, _ = sharded_gpt(mesh)
    for step in (0, 1):
        gpt_loss(model, step, rank).backward()
    native = {name: parameter.grad._local_tensor for name, parameter in model.named_parameters()}
    model, optimizer = sharded_gpt(mesh["shard"])
    with torch.no_grad():
        gpt_loss(model, 0, rank)
    with laconic.attach(
        model, optimizer, "bsp / all_reduce / none", process_group=mesh["replicate"], timeout_s=40
    ) as s:
        with s.accumulate():
            gpt_loss(model, 0, rank).backward()
        gpt_loss(model, 1, rank).backward()
        ours = {name: parameter.grad._local_tensor for name, parameter in model.named_parameters()}
        return all(torch.allclose(native[name], ours[name], rtol=1e-5, atol=1e-7) for name in native)


def _with_hooks(mesh: Any) -> bool:
    """Hooks that a user puts on parameters before and after attaching; they halve gradients before they are taken."""
    rank = dist.get_rank()
    found: list[dict[str, torch.Tensor]] = []
    for halved in (False, True):
        model, optimizer = sharded_gpt(mesh["shard"])
        group = mesh["replicate"]

        def halve(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

        first, *others = model.parameters()
        if halved:
            first.register_post_accumulate_grad_hook(halve)
        with laconic.attach(model, optimizer, "bsp / all_reduce / none", process_group=group, timeout_s=40):
            if halved:
                for parameter in others:
                    parameter.register_post_accumulate_grad_hook(halve)
            for _ in range(2):
                optimizer.zero_grad()
                gpt_loss(model, 0, rank).backward()
            found.append({name: parameter.grad._local_tensor.clone() for name, parameter in model.named_parameters()})
    whole, half = found
    return all(torch.equal(0.5 * whole[name], half[name]) for name in whole)


def _averaged_after_evaluation(mesh: Any) -> bool:
    """Whether a model that was whole for an evaluation sees the average in the next one."""
    rank = dist.get_rank()
    model, optimizer = sharded_gpt(mesh["shard"])
    with laconic.attach(
        model, optimizer, "local_sgd(period=50)", process_group=mesh["replicate"], timeout_s=40
    ) as session:
        train(model, optimizer, gpt_loss, range(3))
        with torch.no_grad():
            gpt_loss(model, 0, rank)
            session.average()
            after = gpt_loss(model, 0, rank)
            for _, part in fsdp_modules(model):
                part.reshard()
            return torch.equal(after, gpt_loss(model, 0, rank))


def bytes_of(strategies: list[str], steps: int) -> dict[str, dict[str, Any]]:
    """Counted and predicted bytes on uneven and empty shards, and whether islands hold the same in the end.

    Where a strategy is refused: what the refusal says.
    """
    with gloo_group():
        mesh = make_mesh()
        found: dict[str, dict[str, Any]] = {}
        for strategy in strategies:
            model, optimizer = sharded_uneven(mesh["shard"])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", LaconicWarning)
                try:
                    session = laconic.attach(
                        model, optimizer, strategy, process_group=mesh["replicate"], timeout_s=40, total_steps=5000
                    )
                except AttachError as error:
                    found[strategy] = {"refused": str(error)}
                    continue
            with session:

                def reported(model: nn.Module, step: int, rank: int, session: laconic.Session = session) -> Any:
                    loss = uneven_loss(model, step, rank)
                    session.report_loss(loss.item())
                    return loss

                train(model, optimizer, reported, range(1))  # the first plan is made without knowing the order
                session.wait()
                before = session.traffic.sent_bytes("payload")
                predicted = 0
                for step in range(1, 1 + steps):
                    predicted += session.predicted_bytes_per_step()
                    train(model, optimizer, reported, range(step, step + 1))
                session.wait()
                sent = session.traffic.sent_bytes("payload") - before
                if not session.strategy.exchanges_gradients():
                    session.average()
            flat = torch.cat([piece.view(-1) for piece in pieces_of(model).values()])
            rows = [torch.empty_like(flat) for _ in range(2)]
            dist.all_gather(rows, flat, group=mesh.get_group("replicate"))
            found[strategy] = {
                "sent": sent,
                "predicted": predicted,
                "equal": torch.equal(rows[0], rows[1]),
                "finite": bool(flat.isfinite().all()),
                "left": [name for name, p in model.named_parameters() if p._post_accumulate_grad_hooks],
            }
        return found


def misuse() -> dict[str, dict[str, Any]]:
    """What cannot work, how long the answer takes, and that nothing is left of it."""
    from torch.distributed.fsdp import fully_shard

    with gloo_group():
        mesh = make_mesh()
        crossed = [dist.new_group(ranks) for ranks in ((0, 3), (1, 2))][0 if dist.get_rank() in (0, 3) else 1]
        plain = "bsp / all_reduce / none"

        def partly(inner: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
            model = Uneven()
            fully_shard(model.first, mesh=inner)
            return model, torch.optim.SGD(model.parameters(), lr=0.1)

        def adapter(inner: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
            """A frozen base that is sharded, and something small and whole that is trained."""
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).requires_grad_(False)
            fully_shard(model[0], mesh=inner)
            model[1].requires_grad_(True)
            return model, torch.optim.SGD(model[1].parameters(), lr=0.1)

        def small(inner: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
            """No matrix of rank 2, neither as a whole nor in pieces."""
            model = nn.Linear(3, 3)
            fully_shard(model, mesh=inner)
            return model, torch.optim.SGD(model.parameters(), lr=0.1)

        def even(inner: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
            model = nn.Linear(4, 4)
            fully_shard(model, mesh=inner)
            return model, torch.optim.SGD(model.parameters(), lr=0.1)

        cases: dict[str, tuple[Callable[[], Any], str, Any]] = {
            "default group": (lambda: sharded_gpt(mesh["shard"]), plain, None),
            "shard group": (lambda: sharded_gpt(mesh["shard"]), plain, mesh["shard"]),
            "native HSDP": (lambda: sharded_gpt(mesh), plain, mesh["replicate"]),
            "two dimensions": (lambda: sharded_gpt(mesh["shard"]), plain, mesh),
            "crossed": (lambda: sharded_uneven(mesh["shard"]), plain, crossed),
            "crossed, even": (lambda: even(mesh["shard"]), plain, crossed),
            "partly": (lambda: partly(mesh["shard"]), plain, mesh["replicate"]),
            "frozen shards": (lambda: adapter(mesh["shard"]), plain, None),
            "an adapter beside": (lambda: adapter(mesh["shard"]), plain, mesh["replicate"]),
            "too small": (
                lambda: small(mesh["shard"]),
                "bsp / all_reduce / powersgd(rank=2)",
                mesh["replicate"],
            ),
            "dion": (lambda: even(mesh["shard"]), "dion", mesh["replicate"]),
        }
        for strategy in ("priority", "dear", "bsp / parameter_server", "ssp", "asp", "asp / gossip", "onebit_adam"):
            text = f"bsp / all_reduce / none / {strategy}" if strategy in ("priority", "dear") else strategy
            cases[strategy] = (lambda: sharded_gpt(mesh["shard"]), text, mesh["replicate"])
        found: dict[str, dict[str, Any]] = {}
        for name, (make, strategy, group) in cases.items():
            model, optimizer = make()
            began_s = time.monotonic()
            try:
                laconic.attach(model, optimizer, strategy, process_group=group, timeout_s=20, total_steps=100).detach()
                said = "nothing"
            except AttachError as exc:
                said = str(exc)
            hooks = [key for key, p in model.named_parameters() if getattr(p, "_post_accumulate_grad_hooks", None)]
            found[name] = {"said": said, "seconds": time.monotonic() - began_s, "left": hooks}
            dist.barrier()
        return found


class Parallel(nn.Module):
    """What tensor parallelism splits by columns and by rows, around a norm that runs on a part of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(inputs)).relu())


def tensor_parallel(steps: int) -> dict[str, float]:
    """How far two replicas of a tensor-parallel model end from a model in one process."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    def make() -> Parallel:
        torch.manual_seed(2)
        return Parallel()

    def loss(model: nn.Module, step: int, replica: int, part: slice = slice(None)) -> torch.Tensor:
        inputs = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(10 * step + replica))
        return (model(inputs[:, part]) - inputs.flip(2)).square().mean()

    with gloo_group():
        mesh = make_mesh()
        alone = make()
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
        for step in range(steps):
            for replica in range(2):
                (loss(alone, step, replica) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        model = make()
        plan = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel()}
        parallelize_module(model, mesh["shard"], plan)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        replica, column = mesh["replicate"].get_local_rank(), mesh["shard"].get_local_rank()
        part = slice(2 * column, 2 * column + 2)  # of the sequence: what runs on a part of it gets that
        with laconic.attach(
            model, optimizer, "bsp / all_reduce / none / fusion", process_group=mesh["replicate"], timeout_s=40
        ):
            for step in range(steps):
                loss(model, step, replica, part).backward()
                optimizer.step()
                optimizer.zero_grad()
        return {
            name: float((parameter.full_tensor() - dict(alone.named_parameters())[name]).detach().abs().max())
            for name, parameter in model.named_parameters()
        }
