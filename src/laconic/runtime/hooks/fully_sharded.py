"""Hooks for a model under fully_shard(): FSDP2 calls these in place of its own all-gathers and reduce-scatters.

FSDP2 still decides which parameters are sent together and when; the strategy decides how. FSDP2 passes flat tensors
without boundaries between parameters: they are contiguous, each padded to equal shards, in the order of fsdp_parts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from laconic.architecture import Architecture
from laconic.core.exchange import Exchange, Wire
from laconic.core.plan import Bucket, Plan
from laconic.core.shard_rows import by_owner, row_of
from laconic.core.stateful import BucketState, ParameterState
from laconic.core.tensor import TensorSpec
from laconic.errors import AttachError, CommunicationError
from laconic.runtime.buckets import whole_state
from laconic.runtime.engine import Engine, Task
from laconic.runtime.fsdp_parts import FsdpPart, fsdp_parts
from laconic.runtime.hooks.contract import TrainingHooks
from laconic.runtime.job import Job
from laconic.runtime.shards import OUTERMOST, plain_name
from laconic.strategy import Strategy


class _Communication:
    """An object that communicates for FSDP2 in place of its usual one."""

    def __init__(self, part: _Part, usual: Any) -> None:
        self.part = part
        self.usual = usual

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for a tensor that is sent or received."""
        # The communication thread writes to it, and is not in the inference mode of an evaluation. Such an evaluation
        # works after the first training pass, as with FSDP2 itself.
        with torch.inference_mode(False):
            return self.usual.allocate(size, dtype=dtype, device=device)


class _AllGather(_Communication):
    """The all-gather of weights."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Fill the output with every rank's input."""
        if group.size() != self.part.world_size:
            # reshard_after_forward=int: an all-gather inside a smaller group.
            return self.usual(output_tensor, input_tensor, group, async_op)
        gathered = self.part.gather(output_tensor, input_tensor)
        if output_tensor.device.type == "cpu":
            # FSDP2 waits for it when it uses the weights, and computes until then.
            return gathered
        # On a GPU its streams wait, not the host.
        gathered.wait()
        return None


class _InFlight(dist.Work):
    """A launched exchange with the interface that FSDP2 waits on."""

    def __init__(self, engine: Engine, task: Task) -> None:
        super().__init__()
        self._engine = engine
        self._task = task

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when its result may be used; the timeout is that of the session."""
        if not (self._task.succeeded and self._task.outputs_ready is None):  # else the session may be detached by now
            self._engine.wait(self._task)
        return True


class _ReduceScatter(_Communication):
    """The reduce-scatter of gradients."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Fill the output with this rank's row of the sum, or mean, of all inputs."""
        self.part.scatter(output_tensor, input_tensor, op)


class _Part:
    """The parameters of one call of fully_shard(), with the state of their exchanges."""

    def __init__(self, hooks: FullyShardedHooks, fsdp: FsdpPart, number: int) -> None:
        self._hooks = hooks
        self._fsdp = fsdp
        self._number = number
        self.world_size = hooks.world_size
        self.name = fsdp.name if fsdp.name == OUTERMOST else f'"{fsdp.name}"'
        self.gathers = 1 if fsdp.name == OUTERMOST else 2
        """Gathers in the last step; FSDP2 keeps its outermost module unsharded between the passes."""
        self.counted = 0
        trained = fsdp.gradients(hooks.names)
        self.gradients = hooks.laid_out(trained) if trained else None
        """The bucket of gradients; None if all are frozen."""
        self._weights = hooks.architecture.init_weights(hooks.strategy.weights_codec, self.weights(), self.world_size)
        self._state: BucketState | None = None
        self._usual = fsdp.communication
        self._sums_unused = fsdp.sums_unused

    def weights(self) -> Bucket:
        """The bucket of weights."""
        return self._hooks.laid_out(self._fsdp.weights(self.gathers))

    def install(self) -> None:
        """Communicate for FSDP2 from now on."""
        gather, scatter = self._usual
        for usual in self._usual:
            if isinstance(usual, _Communication):
                raise AttachError("this model is already attached; call session.detach() first.")
            if not type(usual).__name__.startswith("Default"):
                raise AttachError(
                    f"{self.name} communicates through a {type(usual).__name__} (set_custom_all_gather, "
                    "set_custom_reduce_scatter, or a setting for the memory of collectives), which would have no "
                    "effect. Leave that out."
                )
        self._fsdp.use(_AllGather(self, gather), _ReduceScatter(self, scatter))
        if self._sums_unused is not None:
            # Otherwise the size of a message would depend on which parameters got a gradient.
            self._fsdp.sum_unused(True)

    def remove(self) -> None:
        """Let FSDP2 communicate by itself again, unless another session has taken over."""
        now = self._fsdp.communication[0]
        if isinstance(now, _Communication) and now.part is self:
            self._fsdp.use(*self._usual)
            if self._sums_unused is not None:
                self._fsdp.sum_unused(self._sums_unused)

    @property
    def state(self) -> BucketState | None:
        """The state of its gradients."""
        if self._state is None and self.gradients is not None:
            self._state = self._hooks.remembered(self.gradients)
        return self._state

    def forget(self) -> None:
        """Drop the state; the next use restores a saved one."""
        self._state = None

    def not_summing(self) -> Any:
        """Inside, gradients are accumulated locally."""
        return self._fsdp.not_summing()

    def gather(self, output: torch.Tensor, row: torch.Tensor) -> _InFlight:
        """Launch the gather of every rank's row into `output`."""
        hooks, state = self._hooks, self._weights
        self._check(row, state.bucket.dtype, state.bucket.numel, "weights")
        self.counted += hooks.is_training()

        def start(wire: Wire) -> Exchange:
            rows = output.view(self.world_size, -1)
            return hooks.architecture.gather(row, state, hooks.strategy.weights_codec, wire, rows)

        number = hooks.num_gradients + self._number
        return hooks.begin(f"weights of {self.name}", state, start, row.device, number=number)

    def _check(self, flat: torch.Tensor, dtype: torch.dtype, numel: int, what: str) -> None:
        """Raise unless FSDP2 sends the same parameters as when the session was attached."""
        if flat.dtype == dtype and flat.numel() == numel:
            return
        hooks = self._hooks
        now = {name for name, parameter in hooks.parameters() if parameter.requires_grad}
        problem = "its parameters have been changed. Detach before changing a model, then attach again"
        if now != hooks.names:
            name = min(now ^ hooks.names)
            problem = f'parameter "{name}" has been frozen or unfrozen since then. Detach, then attach again'
        elif flat.dtype == dtype:
            problem = (
                "some parameters got no gradient. Freeze them, or use a PyTorch that has "
                "set_reduce_scatter_unused_params()"
            )
        raise CommunicationError(
            f"step {hooks.step}: FSDP sends {flat.numel()} elements of {flat.dtype} as {what} of {self.name}, which "
            f"was attached with {numel} of {dtype}: {problem}."
        )

    def scatter(self, out: torch.Tensor, rows: torch.Tensor, op: Any) -> None:
        """Fill `out` with this rank's row of the sum or mean."""
        hooks, count, state = self._hooks, self.world_size, self.state
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise CommunicationError(
                f"FSDP asks for {op} of the gradients of {self.name}: set_gradient_divide_factor() has been called, "
                "which only FSDP's own reduce-scatter supports. Scale the loss instead."
            )
        expected = 0 if state is None else count * row_of(state.bucket, count).numel
        self._check(rows, self._fsdp.gradients_dtype, expected, "gradients")
        assert state is not None
        hooks.begin_pass(self)
        lossless, mean = hooks.strategy.codec.traits.lossless, op == dist.ReduceOp.AVG
        if mean and not lossless:
            rows *= hooks.architecture.share(count)

        def start(wire: Wire) -> Exchange:
            yield from hooks.architecture.scatter(rows.view(count, -1), state, hooks.strategy.codec, wire, out)
            if mean and lossless:
                out.div_(count)  # after the sum, as the backend does

        number = hooks.num_gradients - 1 - self._number
        hooks.begin(f"gradients of {self.name}", state, start, rows.device, number=number).wait()


class FullyShardedHooks(TrainingHooks):
    """Compresses the traffic of FSDP2."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.names = frozenset(job.parameters)
        self._all = {plain_name(name): parameter for name, parameter in job.model.named_parameters()}
        self._saved: ParameterState = {}
        self._passed: set[str] = set()
        self._last: Task | None = None
        found = fsdp_parts(job.model)
        # Modules without trained parameters come last, so that buckets of gradients are numbered without gaps.
        found.sort(key=lambda part: not part.gradients(self.names))
        self.num_gradients = sum(bool(part.gradients(self.names)) for part in found)
        self._parts = [_Part(self, part, number) for number, part in enumerate(found)]
        try:
            for part in self._parts:
                part.install()
        except BaseException:
            self.detach()
            raise

    # -- called by the parts -------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """The number of shards."""
        return self._job.transport.world_size

    @property
    def strategy(self) -> Strategy:
        """The strategy."""
        return self._job.strategy

    @property
    def architecture(self) -> Architecture:
        """The architecture that exchanges shards."""
        return self._job.strategy.architecture

    @property
    def step(self) -> int:
        """The current step."""
        return self._job.step

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        """All current parameters of the model, frozen or not."""
        return [(plain_name(name), parameter) for name, parameter in self._job.model.named_parameters()]

    def is_training(self) -> bool:
        """Whether the model is in training mode."""
        return self._job.model.training

    def laid_out(self, tensors: list[TensorSpec]) -> Bucket:
        """The pieces of some parameters in the order of their owners."""
        return by_owner(tensors, self.world_size)

    def remembered(self, bucket: Bucket) -> BucketState:
        """The state of a part, restored if it was saved."""
        state = self._job.strategy.init(bucket)
        state.restore(self._saved)
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

    def begin(
        self,
        what: str,
        state: BucketState,
        start: Callable[[Wire], Exchange],
        device: torch.device,
        *,
        number: int | None,
    ) -> _InFlight:
        """Begin an exchange."""
        job = self._job
        moment = job.moment()

        def begin() -> Exchange:
            state.moment, state.measure = moment, False
            return start(Wire(job.transport, f"{what} in step {moment.step}"))

        task = Task(what, begin, step=job.step, device=device, over_group=True, bucket=number, metrics=state.metrics)
        self._last = job.engine.submit(task)
        return _InFlight(job.engine, task)

    def wait(self) -> None:
        """Exchanges end in the order in which they began."""
        if self._last is not None:
            self._job.engine.wait(self._last)

    def _states(self) -> Iterator[BucketState]:
        return (state for part in self._parts if (state := part.state) is not None)

    # -- called by the session -----------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """The units that FSDP2 exchanges, last ones first."""
        gradients = [part.gradients for part in reversed(self._parts) if part.gradients is not None]
        return Plan(tuple(gradients), weights=tuple(part.weights() for part in self._parts))

    def state(self) -> ParameterState:
        return whole_state(list(self._states()), self._all)

    def load(self, saved: ParameterState, order: list[str], step: int) -> None:
        self._saved = saved
        for part in self._parts:
            part.forget()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Let FSDP2 accumulate unsharded gradients on each rank."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.not_summing())
            yield

    def after_step(self) -> None:
        self._passed = set()
        for part in self._parts:
            part.gathers, part.counted = part.counted or part.gathers, 0

    def detach(self) -> None:
        for part in self._parts:
            part.remove()
