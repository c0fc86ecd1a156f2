"""What the ranks of the tests of compressed FSDP2 do: the shards of one model, on 4 processes or 2 x 2."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import laconic
from laconic.core.hosts import HOST_VARIABLE
from laconic.errors import AttachError, CommunicationError, LaconicWarning
from laconic.runtime.fsdp_parts import fsdp_parts
from laconic.runtime.shards import fsdp_modules
from tests.processes import gloo_group
from tests.runtime.gpu_ranks import nccl_group
from tests.runtime.replicas import mlp, sgd
from tests.runtime.shard_models import gpt_loss, make_mesh, pieces_of, sharded_gpt, sharded_uneven, train, uneven_loss

PLAIN = "bsp / sharded / none / fusion"
BOTH = "bsp / sharded(weights=int8) / int4 + error_feedback / fusion"


def _one_mesh(device: str = "cpu") -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("shard",))


def _attach(model: nn.Module, optimizer: torch.optim.Optimizer, strategy: str, mesh: Any) -> laconic.Session:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LaconicWarning)
        return laconic.attach(model, optimizer, strategy, process_group=mesh["shard"], timeout_s=40)


def equal_to_native(steps: int) -> dict[str, bool]:
    """Which ways of training come to the same bits as FSDP2 alone."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    with gloo_group():
        mesh = _one_mesh()
        found: dict[str, bool] = {}
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        cases: dict[str, dict[str, Any]] = {
            "fp32": {},
            "bf16": {"mp_policy": mixed},
            "kept": {"reshard_after_forward": False},
            "smaller groups": {"reshard_after_forward": 2},
        }
        for name, settings in cases.items():
            model, optimizer = sharded_gpt(mesh, **settings)
            train(model, optimizer, gpt_loss, range(steps), clip=True)
            native = pieces_of(model)
            model, optimizer = sharded_gpt(mesh, **settings)
            with _attach(model, optimizer, PLAIN, mesh):
                train(model, optimizer, gpt_loss, range(steps // 2), clip=True)
            # Detached, FSDP2 does as it did.
            train(model, optimizer, gpt_loss, range(steps // 2, steps), clip=True)
            ours = pieces_of(model)
            found[name] = all(torch.equal(native[key], ours[key]) for key in native)
        found |= _shapes_of_parts(mesh)
        found["as it was after detach"] = _as_it_was(mesh)
        found["accumulated"] = _accumulated(mesh)
        found["unused and frozen"] = _unused_and_frozen(mesh)
        return found


class Own(nn.Module):
    """Parameters of its own beside those of its children, as vision transformers have them; all zeros at first."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(5, 24))
        self.body = nn.Linear(24, 24)
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 7)
        nn.init.zeros_(self.head.weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(inputs) + self.token.sum(0)))


def _own_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    inputs = torch.randn(3, 24, generator=torch.Generator().manual_seed(1000 * step + rank))
    return (model(inputs) - 1).square().mean()


def _shapes_of_parts(mesh: Any) -> dict[str, bool]:
    """Parts whose parameters lie in another order than that of names, or belong to several modules, or are compiled."""
    from torch.distributed.fsdp import fully_shard

    def whole(model: Own) -> nn.Module:
        return fully_shard(model, mesh=mesh)

    def lists(model: Own) -> nn.Module:
        fully_shard([model.norm, model.head], mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def compiled(model: Own) -> nn.Module:
        model.body = torch.compile(model.body, backend="eager")
        fully_shard(model.body, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def compiled_whole(model: Own) -> nn.Module:
        fully_shard(model.body, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return torch.compile(model, backend="eager")

    found: dict[str, bool] = {}
    shapes = {
        "own parameters": whole,
        "lists of modules": lists,
        "compiled": compiled,
        "compiled as a whole": compiled_whole,
    }
    for name, shard in shapes.items():
        states = []
        for strategy in (None, PLAIN, "bsp / sharded / bf16 / fusion"):
            torch.manual_seed(2)
            model = shard(Own())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            with nullcontext() if strategy is None else _attach(model, optimizer, strategy, mesh) as session:
                guessed = 0 if session is None else session.predicted_bytes_per_step()
                train(model, optimizer, _own_loss, range(6))
                if session is not None:
                    found[f"{name}: bytes of the first step of {strategy}"] = (
                        guessed == session.predicted_bytes_per_step()
                    )
                    counted = session.traffic.sent_bytes("payload")
                    found[f"{name}: bytes of {strategy}"] = counted == 6 * session.predicted_bytes_per_step()
            states.append(pieces_of(model))
        native, plain, rounded = states
        found[f"{name}: bits"] = all(torch.equal(native[key], plain[key]) for key in native)
        found[f"{name}: near"] = all(torch.allclose(native[key], rounded[key], atol=0.02) for key in native)
    return found


def _as_it_was(mesh: Any) -> bool:
    """Whether FSDP2 has its own objects and settings again, also after an attach that failed half-way."""
    model, optimizer = sharded_gpt(mesh)
    groups = [part.group for part in fsdp_parts(model)]
    before = [
        (group._all_gather_comm, group._reduce_scatter_comm, group.reduce_scatter_unused_params) for group in groups
    ]
    for strategy in (PLAIN, BOTH):
        with _attach(model, optimizer, strategy, mesh) as session:
            train(model, optimizer, gpt_loss, range(1))
            model.set_requires_gradient_sync(False)
            with session.accumulate():
                pass
            kept = not any(group.reduce_grads for group in groups)
            model.set_requires_gradient_sync(True)
    model.blocks[1].set_custom_all_gather(OfTheUser())
    try:
        _attach(model, optimizer, PLAIN, mesh)
    except AttachError as exc:
        refused = "OfTheUser" in str(exc)
    else:
        refused = False
    model.blocks[1].set_custom_all_gather(before[-1][0])
    after = [
        (group._all_gather_comm, group._reduce_scatter_comm, group.reduce_scatter_unused_params) for group in groups
    ]
    return kept and refused and all(one == other for one, other in zip(before, after, strict=True))


def _settings_of(group: Any) -> tuple[Any, Any, bool]:
    return group._all_gather_comm, group._reduce_scatter_comm, group.reduce_scatter_unused_params


class OfTheUser:
    """An object that communicates in place of FSDP2's own."""


def over_nccl(steps: int) -> dict[str, bool]:
    """All ranks on one GPU: FSDP2's bits uncompressed, the predicted bytes and a near loss compressed."""
    nccl_group()
    try:
        mesh = _one_mesh("cuda")
        model, optimizer = sharded_gpt(mesh)
        train(model, optimizer, gpt_loss, range(steps))
        native, loss = pieces_of(model), gpt_loss(model, steps, 0).item()
        found: dict[str, bool] = {}
        for strategy in (PLAIN, "bsp / sharded(weights=int8) / int8 / fusion", BOTH):
            model, optimizer = sharded_gpt(mesh)
            with _attach(model, optimizer, strategy, mesh) as session:
                train(model, optimizer, gpt_loss, range(steps))
                sent = session.traffic.sent_bytes("payload")
                found[f"{strategy}: bytes"] = sent == steps * session.predicted_bytes_per_step()
            # The outermost module stays gathered after a forward pass, so its shards are read before.
            if strategy == PLAIN:
                ours = pieces_of(model)
                found["bits"] = all(torch.equal(native[key], ours[key]) for key in native)
            found[f"{strategy}: loss"] = abs(gpt_loss(model, steps, 0).item() / loss - 1) < 0.03
        return found
    finally:
        dist.destroy_process_group()


def _accumulated(mesh: Any) -> bool:
    rank = dist.get_rank()
    model, _ = sharded_gpt(mesh)
    model.set_requires_gradient_sync(False)
    gpt_loss(model, 0, rank).backward()
    model.set_requires_gradient_sync(True)
    gpt_loss(model, 1, rank).backward()
    native = {name: parameter.grad._local_tensor for name, parameter in model.named_parameters()}
    model, optimizer = sharded_gpt(mesh)
    with _attach(model, optimizer, PLAIN, mesh) as session:
        for index in range(2):
            with session.accumulate(index == 0):
                gpt_loss(model, index, rank).backward()
        ours = {name: parameter.grad._local_tensor for name, parameter in model.named_parameters()}
    return all(torch.equal(native[name], ours[name]) for name in native)


class Branches(nn.Module):
    """A layer that is left out in some steps, one that is frozen, and one that is always used."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.sometimes = nn.Linear(24, 24)
        self.always = nn.Linear(24, 5)

    def forward(self, inputs: torch.Tensor, *, skip: bool) -> torch.Tensor:
        inner = self.frozen(inputs)
        return self.always(inner if skip else self.sometimes(inner))


def _branches(mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    model = Branches()
    fully_shard(model, mesh=mesh)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.SGD(trained, lr=0.1)


def _branch_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    inputs = torch.randn(3, 24, generator=torch.Generator().manual_seed(1000 * step + rank))
    return model(inputs, skip=step % 2 == 1).square().mean()


def _unused_and_frozen(mesh: Any) -> bool:
    states = []
    for strategy in (None, PLAIN):
        model, optimizer = _branches(mesh)
        model.set_reduce_scatter_unused_params(True)
        if strategy is None:
            train(model, optimizer, _branch_loss, range(6))
        else:
            with _attach(model, optimizer, strategy, mesh) as session:
                train(model, optimizer, _branch_loss, range(3))
                before, predicted = session.traffic.sent_bytes("payload"), session.predicted_bytes_per_step()
                train(model, optimizer, _branch_loss, range(3, 6))
                assert session.traffic.sent_bytes("payload") - before == 3 * predicted
        states.append(pieces_of(model))
    return all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def bytes_of(strategies: list[str], steps: int) -> dict[str, dict[str, Any]]:
    """Counted and predicted bytes on uneven and empty shards, two ranks to a host, and how far the loss came."""
    with gloo_group():
        os.environ[HOST_VARIABLE] = f"host {dist.get_rank() // 2}"
        mesh = _one_mesh()
        found: dict[str, dict[str, Any]] = {}
        for strategy in strategies:
            model, optimizer = sharded_uneven(mesh)
            with _attach(model, optimizer, strategy, mesh) as session:
                guessed = session.predicted_bytes_per_step()
                train(model, optimizer, uneven_loss, range(1))
                first = session.traffic.sent_bytes("payload")
                train(model, optimizer, uneven_loss, range(1, 1 + steps))
                predicted = session.predicted_bytes_per_step()
                sent = session.traffic.sent_bytes("payload") - first
            flat = torch.cat([piece.view(-1) for piece in pieces_of(model).values()])
            found[strategy] = {
                "guessed": guessed,
                "first": first,
                "sent": sent,
                "predicted": steps * predicted,
                "finite": bool(flat.isfinite().all()),
            }
        return found


def misuse() -> dict[str, dict[str, Any]]:
    """What cannot work, and how long the answer takes."""
    from torch.distributed.fsdp import fully_shard

    with gloo_group():
        mesh, grid = _one_mesh(), make_mesh()

        def partly() -> tuple[nn.Module, torch.optim.Optimizer]:
            model = mlp()
            fully_shard(model[0], mesh=mesh)
            return model, sgd(model)

        def several_dtypes() -> tuple[nn.Module, torch.optim.Optimizer]:
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16))
            fully_shard(model, mesh=mesh)
            return model, sgd(model)

        def by_columns() -> tuple[nn.Module, torch.optim.Optimizer]:
            from torch.distributed.tensor import Shard

            model = nn.Linear(8, 8, bias=False)
            fully_shard(model, mesh=mesh, shard_placement_fn=lambda parameter: Shard(1))
            return model, sgd(model)

        def attached() -> tuple[nn.Module, torch.optim.Optimizer]:
            model, optimizer = sharded_gpt(mesh)
            before.append(_attach(model, optimizer, PLAIN, mesh))
            return model, optimizer

        before: list[laconic.Session] = []
        other_order = dist.new_group([3, 2, 1, 0], sort_ranks=False)
        cases: dict[str, tuple[Callable[[], Any], Any, dict[str, Any]]] = {
            "another order": (lambda: sharded_gpt(mesh), other_order, {}),
            "not sharded": (lambda: (model := mlp(), sgd(model)), mesh["shard"], {}),
            "partly": (partly, mesh["shard"], {}),
            "another group": (lambda: sharded_gpt(grid["shard"]), grid["replicate"], {}),
            "a larger group": (lambda: sharded_gpt(grid["shard"]), None, {}),
            "native HSDP": (lambda: sharded_gpt(grid), grid["shard"], {}),
            "several dtypes": (several_dtypes, mesh["shard"], {}),
            "by columns": (by_columns, mesh["shard"], {}),
            "attached": (attached, mesh["shard"], {}),
            "find_unused_parameters": (lambda: sharded_gpt(mesh), mesh["shard"], {"find_unused_parameters": True}),
            "sync_optimizer": (lambda: sharded_gpt(mesh), mesh["shard"], {"sync_optimizer": True}),
            "init_sync": (lambda: sharded_gpt(mesh), mesh["shard"], {"init_sync": False}),
        }
        found: dict[str, dict[str, Any]] = {}
        for name, (make, group, settings) in cases.items():
            model, optimizer = make()
            began_s = time.monotonic()
            try:
                laconic.attach(model, optimizer, PLAIN, process_group=group, timeout_s=20, **settings).detach()
                said = "nothing"
            except AttachError as exc:
                said = str(exc)
            found[name] = {"said": said, "seconds": time.monotonic() - began_s}
            while before:
                before.pop().detach()
            dist.barrier()
        found["after all that"] = {"said": _after_a_refusal(mesh), "seconds": 0.0}
        return found


def _after_a_refusal(mesh: Any) -> str:
    """A factor that only FSDP knows is refused when it is met."""
    model, optimizer = sharded_gpt(mesh)
    model.set_gradient_divide_factor(3.0)
    session = _attach(model, optimizer, PLAIN, mesh)
    try:
        train(model, optimizer, gpt_loss, range(1))
    except CommunicationError as exc:
        return str(exc)
    finally:
        session.detach()
    return "nothing"


def resume(steps: int, folder: str) -> dict[str, bool]:
    """Whether a session that continues from a saved state, in memory or on disk, comes to the same bits."""
    from torch.distributed import checkpoint

    with gloo_group():
        mesh, found = _one_mesh(), {}
        model, optimizer = sharded_gpt(mesh)
        with _attach(model, optimizer, BOTH, mesh) as session:
            train(model, optimizer, gpt_loss, range(steps))
            saved = session.state_dict(), _copied(model.state_dict()), _copied(optimizer.state_dict())
            checkpoint.save({"session": session.state_dict()}, checkpoint_id=folder)
            residuals = session.state_dict()["ranks"][str(session.rank)]
            assert residuals
            for name, parameter in model.named_parameters():
                (residual,) = residuals[name].values()
                assert residual.shape == parameter.shape, "of the whole gradient"
                assert bool(residual.any())
            train(model, optimizer, gpt_loss, range(steps, 2 * steps))
            whole = pieces_of(model)
        for where in ("memory", "disk"):
            model, optimizer = sharded_gpt(mesh)
            train(model, optimizer, gpt_loss, range(1))  # something else
            with _attach(model, optimizer, BOTH, mesh) as session:
                model.load_state_dict(saved[1])
                optimizer.load_state_dict(_copied(saved[2]))  # which takes tensors as they are
                state = saved[0]
                if where == "disk":
                    loaded = {"session": session.state_dict()}
                    checkpoint.load(loaded, checkpoint_id=folder)
                    state = loaded["session"]
                session.load_state_dict(state)
                assert session.step == steps
                train(model, optimizer, gpt_loss, range(steps, 2 * steps))
            again = pieces_of(model)
            found[where] = all(torch.equal(whole[name], again[name]) for name in whole)
        return found


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def inside_and_between(steps: int) -> dict[str, Any]:
    """Compressed inside two groups of shards, DiLoCo between them."""
    with gloo_group():
        mesh = make_mesh()
        model, optimizer = sharded_gpt(mesh["shard"])
        inside = _attach(model, optimizer, BOTH, mesh)
        between = laconic.attach(
            model,
            optimizer,
            "diloco(period=4) / all_reduce / int4 + error_feedback",
            process_group=mesh["replicate"],
            timeout_s=40,
        )
        apart = []
        with inside, between:
            for step in range(steps):
                train(model, optimizer, gpt_loss, range(step, step + 1))
                apart.append(between.consensus_distance())
            steps_counted = inside.step, between.step
            sent = [session.traffic.sent_bytes("payload") for session in (inside, between)]
        hooks = [module for _, module in fsdp_modules(model)]
        return {"apart": apart, "steps": steps_counted, "sent": sent, "parts": len(hooks)}


def a_peer_goes(step: int) -> str:
    """What the others are told when one of them ends inside its own computation."""
    with gloo_group():
        mesh = _one_mesh()
        model, optimizer = sharded_gpt(mesh)
        session = laconic.attach(model, optimizer, BOTH, process_group=mesh["shard"], timeout_s=10)
        try:
            train(model, optimizer, gpt_loss, range(step))
            if dist.get_rank() == 1:
                os._exit(9)
            train(model, optimizer, gpt_loss, range(step, step + 2))
        except CommunicationError as exc:
            return str(exc)
        finally:
            session.detach()
        return "nothing"
