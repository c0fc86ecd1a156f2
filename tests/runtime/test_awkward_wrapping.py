"""A model that is attached and then wrapped by something else: noticed in its first forward pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.errors import AttachError
from tests.processes import gloo_group, run_processes
from tests.runtime.replicas import assert_equal, data, loop, mlp, mlp_loss, sgd, snapshot

STRATEGIES = [
    "ddp",
    "ddp-fp16",
    "dear",
    "diloco(period=2)",
    "bsp / gossip",
    "asp / gossip",
    "asp / parameter_server",
]


def _refusal(act: Callable[[], object]) -> str:
    try:
        act()
    except AttachError as exc:
        return str(exc)
    return "no complaint"


def _wrapped(strategy: str, wrap: Callable[[nn.Module], nn.Module]) -> str:
    """What is said when the attached model, wrapped, is run."""
    model = mlp()
    session = laconic.attach(model, sgd(model), strategy, timeout_s=20)
    try:
        return _refusal(lambda: wrap(model)(data(0, dist.get_rank(), 4, 5)))
    finally:
        session.detach()


class _Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs)


def wrapped_or_beside() -> dict[str, object]:
    """Every wrapper around an attached model, and some around others."""
    with gloo_group():
        return {"refusals": _refusals(), "state": _harmless()}


def _refusals() -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    def split(model: nn.Module) -> nn.Module:
        return parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})

    def sharded(model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, use_orig_params=True)

    found: dict[str, str] = {}
    for strategy in STRATEGIES:
        found[strategy] = _wrapped(strategy, DistributedDataParallel)
    found["holder"] = _wrapped("ddp", lambda model: DistributedDataParallel(_Holder(model)))
    found["fsdp2"] = _wrapped("diloco(period=2)", fully_shard)
    found["tensor parallelism"] = _wrapped("diloco(period=2)", split)
    if torch.accelerator.is_available():
        found["fsdp1"] = _wrapped("diloco(period=2)", sharded)
    outer = _Holder(DistributedDataParallel(mlp()))
    found["a part"] = _refusal(lambda: laconic.attach(outer, sgd(outer), "ddp", timeout_s=20))
    # Nothing is left of an attach that was refused.
    model = mlp()
    with laconic.attach(model, sgd(model), "ddp", timeout_s=20):
        model(data(0, dist.get_rank(), 4, 5)).sum().backward()
    return found


def _harmless() -> dict[str, torch.Tensor]:
    """Wrappers that are none of our business."""
    rank = dist.get_rank()
    # A GAN of which one half is attached and the other wrapped; each is used inside the other's pass.
    generator, critic = mlp(), nn.Linear(3, 1)
    wrapped = DistributedDataParallel(_Both(critic, generator))
    optimizer, other = sgd(generator), sgd(critic)
    with laconic.attach(generator, optimizer, "ddp", timeout_s=20):
        for step in range(3):
            wrapped(data(step, rank, 4, 5)).mean().backward()
            other.step()
            other.zero_grad()
            optimizer.zero_grad()
            (-critic(generator(data(step, rank, 4, 5)))).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            other.zero_grad()
    return {**snapshot(generator), **{f"critic.{name}": value for name, value in snapshot(critic).items()}}


class _Both(nn.Module):
    """A critic that runs a generator which is not a part of it."""

    def __init__(self, critic: nn.Module, generator: nn.Module) -> None:
        super().__init__()
        self.critic = critic
        self._generator = [generator]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            made = self._generator[0](inputs)
        return self.critic(made)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(120)
def test_a_wrapper_around_an_attached_model_is_noticed_in_the_first_forward_pass() -> None:
    results = run_processes("tests.runtime.test_awkward_wrapping:wrapped_or_beside", world_size=2, timeout_s=100)
    for result in results:
        said = result.value["refusals"]
        for strategy in (*STRATEGIES, "holder"):
            assert "then wrapped: DistributedDataParallel averages its gradients as well" in said[strategy]
        assert "laconic.attach(ddp_model, ...)" in said["ddp-fp16"]
        assert "laconic.attach(ddp_model, ...)" not in said["diloco(period=2)"]
        assert "FSDP" in said["fsdp2"]
        assert "FSDP" in said.get("fsdp1", "FSDP")
        assert "parallelize_module (tensor parallelism) has replaced its parameters" in said["tensor parallelism"]
        assert "make the optimizer, then attach" in said["tensor parallelism"]
        assert '"inner" in the model is wrapped in DistributedDataParallel' in said["a part"]
        assert_equal(result.value["state"], results[0].value["state"])


def test_copies_that_data_parallel_runs_are_noticed() -> None:
    def body(model, optimizer, session, rank):
        replica = model._replicate_for_data_parallel()
        with pytest.raises(AttachError, match=r"torch\.nn\.DataParallel runs copies"):
            replica(data(0, rank, 4, 5))
        with torch.no_grad():
            replica(data(0, rank, 4, 5))

    loop(body)


def test_other_ways_to_run_an_attached_model_are_fine() -> None:
    def body(model, optimizer, session, rank):
        compiled = torch.compile(model, backend="eager", fullgraph=True) if rank == 0 else model
        inside = nn.DataParallel(model)  # without GPUs it only passes the call on
        for step in range(2):
            values = dict(model.named_parameters())
            torch.func.functional_call(model, values, (data(step, rank, 4, 5),)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            (compiled(data(step, rank, 4, 5)) + inside(data(step, rank, 4, 5))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    loop(body)


def test_detaching_stops_the_watch() -> None:
    def body(model, optimizer, session, rank):
        hooks = len(model._forward_pre_hooks)
        session.detach()
        assert hooks == 1
        assert not model._forward_pre_hooks
        mlp_loss(model, 0, rank).backward()

    loop(body)
