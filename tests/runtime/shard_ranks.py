"""What the ranks of the tests of sharded models do: 4 processes, 2 islands of 2 shards."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import laconic
from laconic.errors import AttachError, CheckpointError, LaconicWarning
from laconic.experiments.small_gpt import GptShape, SmallGpt
from laconic.runtime.shards import fsdp_modules
from tests.processes import gloo_group
from tests.runtime.gpu_ranks import nccl_group

SCHEDULES = ("sequential", "wfbp", "fusion", "fusion(64KiB)", "mg_wfbp")
_SHAPE = GptShape(layers=2, width=32, heads=2, context=12, vocabulary=61)


def _mesh(replicas: int = 2, device: str = "cpu") -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(
        device, (replicas, dist.get_world_size() // replicas), mesh_dim_names=("replicate", "shard")
    )


def _gpt(mesh: Any, **settings: Any) -> tuple[SmallGpt, torch.optim.Optimizer]:
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


def _uneven(mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = Uneven()
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def _gpt_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    tokens = torch.randint(61, (2, 13), generator=torch.Generator().manual_seed(1000 * step + rank))
    tokens = tokens.to(next(model.parameters()).device)
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def _uneven_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    inputs = torch.randn(3, 24, generator=torch.Generator().manual_seed(1000 * step + rank))
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


Loss = Callable[[nn.Module, int, int], torch.Tensor]


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, steps: range, *, clip: bool = False) -> None:
    for step in steps:
        loss(model, step, dist.get_rank()).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def _pieces(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach()._local_tensor.clone() for name, parameter in model.named_parameters()}


def equal_to_native_over_nccl(steps: int) -> dict[str, bool]:
    """The same with all ranks on one GPU."""
    nccl_group()
    try:
        return _equal_to_native(_mesh(device="cuda"), steps)
    finally:
        dist.destroy_process_group()


def equal_to_native(steps: int) -> dict[str, bool]:
    """Which ways of training come to the same bits as PyTorch's own HSDP."""
    with gloo_group():
        return _equal_to_native(_mesh(), steps)


def _equal_to_native(mesh: Any, steps: int) -> dict[str, bool]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    found: dict[str, bool] = {}
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, settings in (
        ("fp32", {}),
        ("bf16", {"mp_policy": mixed}),
        ("kept", {"reshard_after_forward": False}),
    ):
        model, optimizer = _gpt(mesh, **settings)
        _train(model, optimizer, _gpt_loss, range(steps), clip=True)
        native = _pieces(model)
        for schedule in SCHEDULES if name == "fp32" else ("fusion", "wfbp"):
            model, optimizer = _gpt(mesh["shard"], **settings)
            with laconic.attach(
                model,
                optimizer,
                f"bsp / all_reduce / none / {schedule}",
                process_group=mesh["replicate"],
                timeout_s=40,
            ) as session:
                _train(model, optimizer, _gpt_loss, range(steps), clip=True)
                ends = {bucket.tensors[-1].ready_with for bucket in session.plan.buckets}
            pieces = _pieces(model)
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
    model, _ = _gpt(mesh)
    for step in (0, 1):
        _gpt_loss(model, step, rank).backward()
    native = {name: parameter.grad._local_tensor for name, parameter in model.named_parameters()}
    model, optimizer = _gpt(mesh["shard"])
    with torch.no_grad():
        _gpt_loss(model, 0, rank)
    with laconic.attach(
        model, optimizer, "bsp / all_reduce / none", process_group=mesh["replicate"], timeout_s=40
    ) as s:
        with s.accumulate():
            _gpt_loss(model, 0, rank).backward()
        _gpt_loss(model, 1, rank).backward()
        ours = {name: parameter.grad._local_tensor for name, parameter in model.named_parameters()}
        return all(torch.allclose(native[name], ours[name], rtol=1e-5, atol=1e-7) for name in native)


def _with_hooks(mesh: Any) -> bool:
    """Hooks that a user puts on parameters before and after attaching; they halve gradients before they are taken."""
    rank = dist.get_rank()
    found: list[dict[str, torch.Tensor]] = []
    for halved in (False, True):
        model, optimizer = _gpt(mesh["shard"])
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
                _gpt_loss(model, 0, rank).backward()
            found.append({name: parameter.grad._local_tensor.clone() for name, parameter in model.named_parameters()})
    whole, half = found
    return all(torch.equal(0.5 * whole[name], half[name]) for name in whole)


def _averaged_after_evaluation(mesh: Any) -> bool:
    """Whether a model that was whole for an evaluation sees the average in the next one."""
    rank = dist.get_rank()
    model, optimizer = _gpt(mesh["shard"])
    with laconic.attach(
        model, optimizer, "local_sgd(period=50)", process_group=mesh["replicate"], timeout_s=40
    ) as session:
        _train(model, optimizer, _gpt_loss, range(3))
        with torch.no_grad():
            _gpt_loss(model, 0, rank)
            session.average()
            after = _gpt_loss(model, 0, rank)
            for _, part in fsdp_modules(model):
                part.reshard()
            return torch.equal(after, _gpt_loss(model, 0, rank))


def bytes_of(strategies: list[str], steps: int) -> dict[str, dict[str, Any]]:
    """Counted and predicted bytes on uneven and empty shards, and whether islands hold the same in the end."""
    with gloo_group():
        mesh = _mesh()
        found: dict[str, dict[str, Any]] = {}
        for strategy in strategies:
            model, optimizer = _uneven(mesh["shard"])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", LaconicWarning)
                session = laconic.attach(model, optimizer, strategy, process_group=mesh["replicate"], timeout_s=40)
            with session:
                _train(model, optimizer, _uneven_loss, range(1))  # the first plan is made without knowing the order
                session.wait()
                before = session.traffic.sent_bytes("payload")
                predicted = 0
                for step in range(1, 1 + steps):
                    predicted += session.predicted_bytes_per_step()
                    _train(model, optimizer, _uneven_loss, range(step, step + 1))
                session.wait()
                sent = session.traffic.sent_bytes("payload") - before
                if not session.strategy.exchanges_gradients():
                    session.average()
            flat = torch.cat([piece.view(-1) for piece in _pieces(model).values()])
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
        mesh = _mesh()
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
            "default group": (lambda: _gpt(mesh["shard"]), plain, None),
            "shard group": (lambda: _gpt(mesh["shard"]), plain, mesh["shard"]),
            "native HSDP": (lambda: _gpt(mesh), plain, mesh["replicate"]),
            "two dimensions": (lambda: _gpt(mesh["shard"]), plain, mesh),
            "crossed": (lambda: _uneven(mesh["shard"]), plain, crossed),
            "crossed, even": (lambda: even(mesh["shard"]), plain, crossed),
            "partly": (lambda: partly(mesh["shard"]), plain, mesh["replicate"]),
            "frozen shards": (lambda: adapter(mesh["shard"]), plain, None),
            "an adapter beside": (lambda: adapter(mesh["shard"]), plain, mesh["replicate"]),
            "too small": (
                lambda: small(mesh["shard"]),
                "bsp / all_reduce / powersgd(rank=2)",
                mesh["replicate"],
            ),
        }
        for strategy in ("priority", "dear", "bsp / parameter_server", "ssp", "asp", "asp / gossip", "onebit_adam"):
            text = f"bsp / all_reduce / none / {strategy}" if strategy in ("priority", "dear") else strategy
            cases[strategy] = (lambda: _gpt(mesh["shard"]), text, mesh["replicate"])
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
        mesh = _mesh()
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


STRATEGIES_TO_SAVE = (
    "bsp / all_reduce / int4 + error_feedback / fusion",
    "bsp / all_reduce / powersgd(rank=2) + error_feedback / fusion",
    "diloco(period=4) / all_reduce / int4 + error_feedback",
)


def save_and_resume(folder: str) -> dict[str, Any]:
    """Continue from a session's state, from memory and from torch.distributed.checkpoint: the same bits?"""
    import torch.distributed.checkpoint as dcp

    with gloo_group():
        mesh = _mesh()
        found: dict[str, Any] = {}
        for number, strategy in enumerate(STRATEGIES_TO_SAVE):
            place = Path(folder) / str(number)
            model, optimizer = _gpt(mesh["shard"])
            options = {"process_group": mesh["replicate"], "timeout_s": 40}
            with laconic.attach(model, optimizer, strategy, **options) as session:
                _train(model, optimizer, _gpt_loss, range(6))
                state = session.state_dict()
                pieces = _pieces(model)
                inner = {key: value.clone() for key, value in _optimizer_pieces(model, optimizer).items()}
                dcp.save({"session": state}, checkpoint_id=place)
                whole = _whole(state, session.rank)
                _train(model, optimizer, _gpt_loss, range(6, 10))
            expected = _pieces(model)
            for way in ("memory", "checkpoint"):
                model, optimizer = _gpt(mesh["shard"])
                with laconic.attach(model, optimizer, strategy, **options) as session:
                    _train(model, optimizer, _gpt_loss, range(4))  # so that the optimizer has a state
                    with torch.no_grad():
                        for name, parameter in model.named_parameters():
                            parameter._local_tensor.copy_(pieces[name])
                        for key, value in _optimizer_pieces(model, optimizer).items():
                            value.copy_(inner[key])
                    loaded = state
                    if way == "checkpoint":
                        loaded = {"session": session.state_dict()}
                        dcp.load(loaded, checkpoint_id=place)
                        loaded = loaded["session"]
                    session.load_state_dict(loaded)
                    _train(model, optimizer, _gpt_loss, range(6, 10))
                ours = _pieces(model)
                found[f"{strategy}: {way}"] = all(torch.equal(expected[name], ours[name]) for name in expected)
            found[f"{strategy}: whole"] = whole
        return found


def load_torn(broken: int) -> dict[str, str]:
    """What every rank says if one of them loads a state that is not as it must be."""
    with gloo_group():
        mesh = _mesh()
        found: dict[str, str] = {}
        for problem in ("a field is missing", "of another step"):
            model, optimizer = _gpt(mesh["shard"])
            strategy = STRATEGIES_TO_SAVE[0]
            with laconic.attach(model, optimizer, strategy, process_group=mesh["replicate"], timeout_s=20) as session:
                states = []
                for step in range(2):
                    _train(model, optimizer, _gpt_loss, range(step, step + 1))
                    states.append(session.state_dict())
                state = states[1]
                island = mesh["shard"].get_local_rank() == broken % 2
                if problem == "of another step" and island:  # of one piece on all islands, so that these agree
                    state = states[0]
                if problem == "a field is missing" and dist.get_rank() == broken:
                    del state["ranks"][str(session.rank)]["norm.weight"]
                try:
                    session.load_state_dict(state)
                    found[problem] = "nothing"
                except CheckpointError as exc:
                    found[problem] = str(exc)
        return found


def load_onto_other_shards(folder: str) -> dict[str, Any]:
    """As `save_and_resume` has left it, on half as many ranks: two islands of one shard."""
    import torch.distributed.checkpoint as dcp

    with gloo_group():
        mesh = _mesh()
        strategy = STRATEGIES_TO_SAVE[0]
        model, optimizer = _gpt(mesh["shard"])
        with laconic.attach(model, optimizer, strategy, process_group=mesh["replicate"], timeout_s=40) as session:
            _train(model, optimizer, _gpt_loss, range(1))
            loaded = {"session": session.state_dict()}
            dcp.load(loaded, checkpoint_id=Path(folder) / "0")
            session.load_state_dict(loaded["session"])
            return _whole(session.state_dict(), session.rank)


def _whole(state: dict[str, Any], rank: int) -> dict[str, torch.Tensor]:
    """Residuals of all shards together."""
    fields = state["ranks"][str(rank)]
    return {
        f"{name} {key}": value.full_tensor()
        for name, of in fields.items()
        for key, value in of.items()
        if hasattr(value, "full_tensor")
    }


def _optimizer_pieces(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name} {key}": getattr(value, "_local_tensor", value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor)
    }
