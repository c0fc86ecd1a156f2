"""Detects wrappers that would synchronize an attached model a second time.

A framework that is handed an attached model may wrap it in DistributedDataParallel, FSDP or DataParallel, or split it
by tensor parallelism. A wrapper leaves no trace on the model itself, so each forward pass checks for one.
"""

from __future__ import annotations

import sys
import weakref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from laconic.errors import AttachError
from laconic.runtime.hooks.module_hook import before_forward
from laconic.runtime.job import Job
from laconic.runtime.shards import fsdp_modules, is_sharded


def watch_for_wrappers(job: Job) -> RemovableHandle:
    """Raises now if another wrapper synchronizes the model, and in a forward pass if one is added later."""
    for name, parameter in job.parameters.items():
        refuse_optimizer_in_backward(name, parameter)
    return before_forward(job.model, _Watch(job).before_forward, first=True)


def refuse_optimizer_in_backward(name: str, parameter: torch.Tensor) -> None:
    """Raise if this parameter is updated inside the backward pass, before its gradient has been exchanged."""
    if hasattr(parameter, "_in_backward_optimizers"):
        raise AttachError(
            f'parameter "{name}" has an optimizer of its own that makes its step inside the backward pass '
            "(torch.distributed.optim._apply_optimizer_in_backward), before gradients are exchanged. Use one optimizer "
            "for all parameters and attach to that."
        )


class _Watch:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._class = type(job.model)
        self._sharded = {id(part) for _, part in fsdp_modules(job.model)}
        self._has_pieces = any(map(is_sharded, job.model.parameters()))
        self._known = {id(parameter) for parameter in job.parameters.values()}
        self._first = next(iter(job.parameters.values()))
        self._looked_inside = False
        self._harmless: weakref.ref[nn.Module] | None = None

    def before_forward(self, module: nn.Module) -> None:
        """Raise if a wrapper runs the attached model."""
        if torch.compiler.is_compiling():
            return  # torch.compile of a wrapper would only see constants
        if module is not self._job.model:
            if getattr(module, "_is_replica", False) and torch.is_grad_enabled():
                raise self._refusal("torch.nn.DataParallel", "runs copies of it, which are not synchronized")
            return
        around = DistributedDataParallel._active_ddp_module
        if around is not None and around is not module:
            self._refuse_ddp(around)
        if type(module) is not self._class or not self._looked_inside:
            self._looked_inside = True
            refuse_wrapped_parts(module)
            if any(id(part) not in self._sharded for _, part in fsdp_modules(module)):
                raise self._refusal("fully_shard (FSDP2)", "has taken its parameters apart")
            if not self._has_pieces and any(map(is_sharded, module.parameters())):
                raise self._refusal("parallelize_module (tensor parallelism)", "has replaced its parameters")
        if getattr(self._first, "_fsdp_flattened", False) or next(module.parameters(), None) is None:
            raise self._refusal("FSDP", "has taken its parameters apart")

    def _refuse_ddp(self, around: DistributedDataParallel) -> None:
        if self._harmless is not None and self._harmless() is around:
            return
        group = around.process_group
        if group is not None and group.size() > 1 and any(id(p) in self._known for p in around.parameters()):
            raise self._refusal("DistributedDataParallel", "averages its gradients as well")
        self._harmless = weakref.ref(around)  # another model's, e.g. the other half of a GAN

    def _refusal(self, wrapper: str, does: str) -> AttachError:
        strategy = self._job.strategy
        instead = "Train it as it is, without that wrapper: laconic keeps its replicas in step"
        if wrapper.startswith(("fully_shard", "parallelize_module")):
            instead = "Shard it first, then make the optimizer, then attach"
        if wrapper == "DistributedDataParallel" and strategy.exchanges_gradients():
            instead += "; or wrap it first and attach to the wrapped model, laconic.attach(ddp_model, ...)"
        return AttachError(
            f'the model was attached (strategy "{strategy}") and then wrapped: {wrapper} {does}. {instead}. A '
            "framework that wraps models itself must be configured not to."
        )


def refuse_wrapped_parts(model: nn.Module) -> None:
    """Raise if a wrapper synchronizes a submodule of the model."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    wrappers: tuple[type, ...] = (DistributedDataParallel,)
    if fsdp is not None:
        wrappers += (fsdp.FullyShardedDataParallel,)
    for name, part in model.named_modules():
        if isinstance(part, wrappers) and not (name == "" and isinstance(part, DistributedDataParallel)):
            raise AttachError(
                f'"{name or type(model).__name__}" in the model is wrapped in {type(part).__name__}, which '
                "synchronizes that part itself: both would communicate. Attach to a model without wrapped parts"
                + ("." if isinstance(part, DistributedDataParallel) else "; shard with fully_shard() instead of FSDP.")
            )
