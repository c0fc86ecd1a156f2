"""A model that fully_shard() has cut up: FSDP2 calls us in place of its own all-gathers and reduce-scatters.

FSDP2 keeps deciding what travels together and when; the strategy decides how. What it hands over has no borders between
parameters: they lie side by side in the order of registration, each padded to equal shards, which is checked. A
communication object cannot be taken off again, so ours stays and, while no session is attached, does what FSDP2 does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from laconic.architecture import Architecture
from laconic.core.exchange import Exchange, Wire
from laconic.core.plan import Bucket, Plan
from laconic.core.shard_rows import by_owner, row_of
from laconic.core.stateful import BucketState, ParameterState
from laconic.core.tensor import TensorSpec
from laconic.errors import AttachError, CommunicationError
from laconic.runtime.buckets import whole_state
from laconic.runtime.engine import Task
from laconic.runtime.hooks.contract import TrainingHooks
from laconic.runtime.job import Job
from laconic.runtime.shards import OUTERMOST, fsdp_modules, local, whole_specs
from laconic.strategy import Strategy

# torch 2.13 renamed these; the old names warn there and the new ones do not exist in 2.11.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Communication:
    """What FSDP2 asks of an object that communicates, beside the call itself."""

    def __init__(self) -> None:
        self.part: _Part | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for what is sent or received."""
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Communication):
    """In place of FSDP2's all-gather of one part."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Fill the output with every rank's input."""
        # A smaller group: reshard_after_forward=int, which gathers what this object has gathered before.
        if self.part is None or group.size() != self.part.world_size:
            return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        self.part.gather(output_tensor, input_tensor)
        return None


class _ReduceScatter(_Communication):
    """In place of FSDP2's reduce-scatter of one part."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Fill the output with this rank's row of the sum, or mean, of all inputs."""
        if self.part is None:
            return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        self.part.scatter(output_tensor, input_tensor, op)
        return None


_ours: weakref.WeakKeyDictionary[nn.Module, tuple[_AllGather, _ReduceScatter]] = weakref.WeakKeyDictionary()
"""The objects that modules have from us."""


class _Part:
    """One module that fully_shard() was called with."""

    def __init__(self, hooks: FullyShardedHooks, number: int, name: str, tensors: list[TensorSpec]) -> None:
        self._hooks = hooks
        self._number = number
        self.name = name
        self.world_size = hooks.world_size
        self._tensors = tensors
        """All of its parameters, in the order of registration; a frozen one is gathered all the same."""
        self._checked = False
        self.gathers = 1 if name == OUTERMOST else 2
        """In the last step; FSDP2 keeps its outermost module whole between the passes."""
        self.counted = 0
        self._weights: BucketState | None = None
        self._gradients: BucketState | None = None

    def trained(self, dtype: torch.dtype | None = None) -> list[TensorSpec]:
        """What gets gradients."""
        names = self._hooks.names
        return [replace(one, dtype=dtype or one.dtype) for one in self._tensors if one.name in names]

    def weights(self) -> Bucket:
        """What is put together."""
        row = None if self._weights is None else self._weights.bucket.dtype
        found = [replace(one, gathers=self.gathers, dtype=row or one.dtype) for one in self._tensors]
        return self._hooks.laid_out(found)

    def gradients(self) -> Bucket | None:
        """What is summed; None if all is frozen."""
        if self._gradients is not None:
            return self._gradients.bucket
        trained = self.trained()
        return self._hooks.laid_out(trained) if trained else None

    @property
    def state(self) -> BucketState | None:
        """What is remembered of its gradients."""
        bucket = self.gradients()
        if self._gradients is None and bucket is not None:
            self._gradients = self._hooks.remembered(bucket)
        return self._gradients

    def forget(self) -> None:
        """Begin again from what was saved."""
        self._gradients = None

    def gather(self, output: torch.Tensor, row: torch.Tensor) -> None:
        """Fill `output` with what everybody gets of all rows."""
        hooks = self._hooks
        if self._weights is None or self._weights.bucket.dtype != row.dtype:
            self._weights = self._state_of_weights(row)
        state, codec = self._weights, hooks.strategy.weights_codec
        self.counted += hooks.is_training()

        def start(wire: Wire) -> Exchange:
            return hooks.architecture.gather(row, state, codec, wire, output.view(self.world_size, -1))

        hooks.run(f"weights of {self.name}", state, start, row.device, number=None)

    def _state_of_weights(self, row: torch.Tensor) -> BucketState:
        hooks = self._hooks
        weights = hooks.laid_out([replace(one, dtype=row.dtype) for one in self._tensors])
        state = hooks.architecture.init_weights(hooks.strategy.weights_codec, weights, self.world_size)
        if not self._checked:
            self._check_order(row, state.bucket)
            self._checked = True
        return state

    def _check_order(self, row: torch.Tensor, bucket: Bucket) -> None:
        """Raise unless parameters lie in the row as we think they do."""
        problem = "" if row.numel() == bucket.numel else f"it has {row.numel()} elements, not {bucket.numel}"
        for tensor, place in [] if problem else bucket.segments():
            mine = local(self._hooks.parameter(tensor.owner)).detach().reshape(-1).to(row.dtype)
            if not torch.equal(row[place][: mine.numel()], mine):
                problem = f'parameter "{tensor.owner}" is not where it is expected'
                break
        if problem:
            raise CommunicationError(
                f"what FSDP sends for {self.name} cannot be told apart by parameter: {problem}. "
                'Call fully_shard() on single modules, without shard_placement_fn, or use "all_reduce" between groups '
                "of shards."
            )

    def scatter(self, out: torch.Tensor, rows: torch.Tensor, op: Any) -> None:
        """Fill `out` with this rank's row of the sum or mean."""
        hooks = self._hooks
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise CommunicationError(
                f"FSDP asks for {op} of the gradients of {self.name}: set_gradient_divide_factor() has been called, "
                "which only FSDP's own reduce-scatter knows. Scale the loss instead."
            )
        if self._gradients is None or self._gradients.bucket.dtype != rows.dtype:
            self._gradients = hooks.remembered(hooks.laid_out(self.trained(rows.dtype)), before=self._gradients)
        state, count = self._gradients, self.world_size
        expected = count * row_of(state.bucket, count).numel
        if rows.numel() != expected:
            raise CommunicationError(
                f"step {hooks.step}: FSDP sends {rows.numel()} elements of gradients for {self.name}, and its trained "
                f"parameters have {expected}: some got no gradient. Call "
                "model.set_reduce_scatter_unused_params(True), which newer versions of PyTorch have, or freeze them."
            )
        hooks.begin_pass(self)
        lossless, mean = hooks.strategy.codec.traits.lossless, op == dist.ReduceOp.AVG
        if mean and not lossless:
            rows *= hooks.architecture.share(count)

        def start(wire: Wire) -> Exchange:
            yield from hooks.architecture.scatter(rows.view(count, -1), state, hooks.strategy.codec, wire, out)
            if mean and lossless:
                out.div_(count)  # afterwards, as the backend does

        hooks.run(f"gradients of {self.name}", state, start, rows.device, number=self._number)


class FullyShardedHooks(TrainingHooks):
    """Compresses what FSDP2 sends."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.names = frozenset(job.parameters)
        self._all = dict(job.model.named_parameters())
        self._saved: ParameterState = {}
        self._passed: set[str] = set()
        self._modules = [module for _, module in fsdp_modules(job.model)]
        parts = whole_specs(job.model)
        self._parts = {name: _Part(self, number, name, tensors) for number, (name, tensors) in enumerate(parts.items())}
        taken = [module for module in self._modules if module in _ours and _ours[module][0].part is not None]
        if taken:
            raise AttachError("this model is already attached; call session.detach() first.")
        for name, module in fsdp_modules(job.model):
            self._install(module, self._parts.get(name or OUTERMOST))

    def _install(self, module: Any, part: _Part | None) -> None:
        if part is None:
            return  # all of its parameters belong to parts inside
        if module not in _ours:
            gather, scatter = _AllGather(), _ReduceScatter()
            try:
                module.set_custom_all_gather(gather)
                module.set_custom_reduce_scatter(scatter)
            except ValueError as exc:
                raise AttachError(
                    f"{part.name} has parameters on several meshes, and FSDP hands over what is on one. Shard all of "
                    "them over one mesh."
                ) from exc
            _ours[module] = gather, scatter
        for communication in _ours[module]:
            communication.part = part
        if hasattr(module, "set_reduce_scatter_unused_params"):
            # Else what is sent would change with the parameters that got a gradient.
            module.set_reduce_scatter_unused_params(True, recurse=False)

    # -- what parts ask -----------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Owners of shards."""
        return self._job.transport.world_size

    @property
    def strategy(self) -> Strategy:
        """What is running."""
        return self._job.strategy

    @property
    def architecture(self) -> Architecture:
        """How shards travel."""
        return self._job.strategy.architecture

    @property
    def step(self) -> int:
        """The step that is being made."""
        return self._job.step

    def parameter(self, name: str) -> torch.Tensor:
        """One of the model's, frozen or not."""
        return self._all[name]

    def is_training(self) -> bool:
        """Whether passes belong to training, as far as one can tell."""
        return self._job.model.training

    def laid_out(self, tensors: list[TensorSpec]) -> Bucket:
        """The pieces of some parameters in the order of their owners."""
        return by_owner(tensors, self.world_size)

    def remembered(self, bucket: Bucket, *, before: BucketState | None = None) -> BucketState:
        """The state of a part: as it was saved, or as it was before its dtype turned out to be another one."""
        state = self._job.strategy.init(bucket)
        state.restore(self._saved)
        if before is not None:
            state.restore(self._merged([before]))
        return state

    def begin_pass(self, part: _Part) -> None:
        """Notice the first part of a backward pass."""
        if self._passed and part.name not in self._passed:
            self._passed.add(part.name)
            return
        self._passed = {part.name}
        ratio = self._job.loss_scale.begin_pass()
        if ratio is not None:
            for state in self._states():
                state.rescale(ratio, self._job.strategy.scaled_fields())

    def run(
        self,
        what: str,
        state: BucketState,
        start: Callable[[Wire], Exchange],
        device: torch.device,
        *,
        number: int | None,
    ) -> None:
        """Run an exchange and wait for it; FSDP2 overlaps by streams."""
        job = self._job
        moment = job.moment()

        def begin() -> Exchange:
            state.moment, state.measure = moment, False
            return start(Wire(job.transport, f"{what} in step {moment.step}"))

        task = Task(what, begin, step=job.step, device=device, bucket=number, metrics=state.metrics)
        job.engine.wait(job.engine.submit(task))

    def _states(self) -> Iterator[BucketState]:
        return (state for part in self._parts.values() if (state := part.state) is not None)

    def _merged(self, states: Sequence[BucketState]) -> ParameterState:
        return whole_state(states, self._all)

    # -- what the session asks ----------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """See TrainingHooks; the parts that FSDP2 sends, last ones first."""
        gradients = [bucket for part in reversed(self._parts.values()) if (bucket := part.gradients()) is not None]
        return Plan(tuple(gradients), weights=tuple(part.weights() for part in self._parts.values()))

    def state(self) -> ParameterState:
        """See TrainingHooks."""
        return self._merged(list(self._states()))

    def load(self, saved: ParameterState, order: list[str], step: int) -> None:
        """See TrainingHooks."""
        self._saved = saved
        for part in self._parts.values():
            part.forget()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """See TrainingHooks; FSDP2 adds up whole gradients on each rank."""
        self._sync_gradients(False)
        try:
            yield
        finally:
            self._sync_gradients(True)

    def _sync_gradients(self, enabled: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(enabled, recurse=False)

    def after_step(self) -> None:
        """See TrainingHooks."""
        self._passed = set()
        for part in self._parts.values():
            part.gathers, part.counted = part.counted or part.gathers, 0

    def detach(self) -> None:
        """See TrainingHooks."""
        for module in self._modules:
            for communication in _ours.get(module, ()):
                communication.part = None
