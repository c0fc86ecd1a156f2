"""One model under one strategy, trained in turns with the others of a contest."""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from laconic.core.event import Event, EventList, EventSink, Scalar, TaggedEvents
from laconic.core.paced import link_from_environment
from laconic.core.paced_ddp import pace_ddp
from laconic.core.tensor import TensorSpec
from laconic.experiments.rank_messages import Progress, tell
from laconic.experiments.sharded_model import ShardGrid
from laconic.experiments.step_timer import StepTimer
from laconic.experiments.tasks import Task
from laconic.report.results import NO_COMMUNICATION, TORCH_DDP, TORCH_HOOKS, is_torchs_own
from laconic.runtime import Session, attach
from laconic.runtime.stopwatch import Mark
from laconic.strategy import Strategy

_TIMEOUT_S = 120.0


class Contender:
    """One model under one strategy.

    number: its place among the contenders of the contest.
    grid: which ranks shard the model; None: every rank has a whole model.
    link: the name of the link in the events.
    total_steps: the number of steps it will make, if known.
    timer: makes the timer of its steps.
    """

    def __init__(
        self,
        number: int,
        strategy: str,
        task: Task,
        device: torch.device,
        grid: ShardGrid | None = None,
        *,
        link: str,
        total_steps: int | None = None,
        timer: Callable[[torch.device, EventSink, int], StepTimer] = StepTimer,
    ) -> None:
        self.strategy = strategy
        self.num_steps = 0
        self.seconds = 0.0
        """Training time; on a GPU by the wall clock of whole turns."""
        self._number = number
        self._task = task
        self._device = device
        self._buffer = EventList()
        self._link = link
        events = TaggedEvents(self._buffer, strategy=strategy, link=link)
        self._timer = timer(device, events, dist.get_rank())
        self._model = task.model().to(device)
        self._lone: nn.Module | None = None
        """The same model without communication between hosts, where this one cannot switch it off: FSDP2 would add
        unsent gradients to those of the next step, and zero_grad() does not clear them."""
        among = None
        if grid is not None:
            among = grid.shard(self._model, strategy)
            if among is not grid.between and strategy != NO_COMMUNICATION:
                self._lone = task.model().to(device)
                grid.shard(self._lone, NO_COMMUNICATION)
        parsed = None if is_torchs_own(strategy) else Strategy.parse(strategy)
        directions = parsed is not None and not parsed.synchronization.keeps_scale
        self._optimizer = task.optimizer(self._model, directions=directions)
        self._session: Session | None = None
        self._forward: nn.Module = self._model
        if strategy in (TORCH_DDP, *TORCH_HOOKS.values()):
            self._forward = _torch_ddp(self._model, strategy)
        elif parsed is not None:
            self._session = attach(
                self._model,
                self._optimizer,
                strategy,
                process_group=among,
                # The seed makes models equal; shards are not compared when attaching.
                init_sync=parsed.architecture.holds_shards,
                timeout_s=_TIMEOUT_S,
                total_steps=total_steps,
                events=events,
            )
        self._until: Mark = 0.0
        self._rehearsed_s = 0.0
        self._loss: float | None = None
        self._wire_bytes: int | None = None

    def rehearse(self) -> None:
        """Make the first steps until everything has been exchanged once, and undo them.

        Before the clock starts, kernels are then compiled, here and on servers, connections are open and memory is
        allocated; model, optimizer, session and random numbers are restored.
        """
        if self.strategy == TORCH_HOOKS["powersgd"]:
            return  # this hook's state cannot be restored, and it compiles nothing
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            # The session first: where replicas differ, the model's parameters are complete only after that.
            session = None if self._session is None else self._session.state_dict()
            # Replayed parameters never change, and a copy would need real memory.
            model = copy.deepcopy(self._model.state_dict()) if self._task.learns else None
            optimizer = copy.deepcopy(self._optimizer.state_dict())
            for _ in range(self._steps_to_exchange_all()):
                self._step(0)
            self._settle()
            if self._session is not None:
                self._session.state_dict()  # makes deferred updates
            if model is not None:
                self._model.load_state_dict(model)
            self._optimizer.load_state_dict(optimizer)
            if self._session is not None and session is not None:
                self._session.load_state_dict(session)
        self._settle()
        dist.barrier()
        self._rehearsed_s = self._now()

    def _steps_to_exchange_all(self) -> int:
        if self._session is None:
            return 1
        rule = self._session.strategy.synchronization
        return max(1, rule.interval + rule.delay)

    def turn(self, num_steps: int) -> list[Event]:
        """Make some steps and return what happened in them."""
        dist.barrier()
        self._alone()
        # The kernel's counters are read while no rank sends.
        self._settle()
        dist.barrier()
        began_s, kernel_before, counted_before = self._now(), _kernel_sent_bytes(), self._counted_bytes()
        seconds_before = self.seconds
        self._until = self._timer.mark()
        losses: list[torch.Tensor] = []
        for number in range(num_steps):
            losses.append(self._iteration(last=number + 1 == num_steps))
            self._progress(seconds_before + self._now() - began_s)
        self._settle()  # the next contender must not share the link with exchanges still in flight
        wall_s = self._now() - began_s if self._timer.runs_behind else None
        if wall_s is not None:
            self.seconds = seconds_before + wall_s
        dist.barrier()
        ended_s, kernel_after = self._now(), _kernel_sent_bytes()
        kernel = None if kernel_before is None or kernel_after is None else kernel_after - kernel_before
        counted = None if self._session is None else self._counted_bytes() - counted_before
        means = self._mean_losses(losses)
        self._agree_on_seconds()
        recorded = [event for event in self._buffer.events if self._counts(event)]
        self._buffer.events = []
        iterations = [event for event in recorded if event.kind == "iteration"]
        for event, loss in zip(iterations, means, strict=True):
            event.data["loss"] = loss
        about: dict[str, Scalar] = {
            "strategy": self.strategy,
            "link": self._link,
            "num_steps": num_steps,
            "wall_s": wall_s,
            "kernel_bytes": kernel,
            "counted_bytes": counted,
            "predicted_bytes": self._predicted_bytes(),
        }
        self._loss = means[-1]
        sent = counted if kernel is None else kernel
        self._wire_bytes = None if sent is None else sent // num_steps
        return [*recorded, Event("turn", began_s, dist.get_rank(), self.num_steps, ended_s - began_s, about)]

    def finish(self) -> list[Event]:
        """Remove every hook; return events recorded after the last turn."""
        if self._session is not None:
            self._session.detach()
        return self._buffer.events

    def _counts(self, event: Event) -> bool:
        """Whether an event is not part of the warm-up."""
        return event.time_s >= self._rehearsed_s or event.kind == "attach"

    def _now(self) -> float:
        return time.perf_counter()

    def _settle(self) -> None:
        """Wait until this contender has nothing in flight, neither on the network nor on a GPU."""
        if self._session is not None:
            self._session.wait()
        self._timer.settle()

    def _batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = self._task.batch(step, dist.get_rank())
        return inputs.to(self._device), targets.to(self._device)

    def _without_communication(self) -> AbstractContextManager[object]:
        if self._lone is not None:
            return nullcontext()
        if isinstance(self._forward, DistributedDataParallel):
            return self._forward.no_sync()
        return nullcontext() if self._session is None else self._session.accumulate()

    def _alone(self) -> None:
        """One forward and backward pass without communication, from which exposed communication is computed."""
        inputs, targets = self._batch(0)
        began = self._timer.mark()
        with self._without_communication():
            self._task.loss((self._lone or self._forward)(inputs), targets).backward()
        self._timer.note("alone", self.num_steps, began, self._timer.mark())
        (self._lone or self._optimizer).zero_grad()

    def _step(self, number: int) -> tuple[torch.Tensor, list[Mark]]:
        """One training step; returns its loss on this rank, and the ends of forward, backward and optimizer."""
        inputs, targets = self._batch(number)
        loss = self._task.loss(self._forward(inputs), targets)
        marks = [self._timer.mark()]
        loss.backward()
        marks.append(self._timer.mark())
        if self._session is not None and self._session.strategy.synchronization.asks_for_loss:
            # What is replayed learns nothing: a loss that stays the same changes no decision.
            self._session.report_loss(loss if self._task.learns else 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach(), [*marks, self._timer.mark()]

    def _iteration(self, *, last: bool) -> torch.Tensor:
        """One recorded training step; returns its loss on this rank.

        The last step of a turn also waits for exchanges that are still in flight. On a GPU, the wall clock of the turn
        includes that time.
        """
        counted = self._counted_bytes()
        # A step begins where the last one ended: steps then add up to the time of the turn.
        began = self._until
        loss, (forward, backward, ended) = self._step(self.num_steps)
        if last and self._session is not None and not self._timer.runs_behind:
            self._session.wait()
            ended = self._timer.mark()
        sent = None if self._session is None else self._counted_bytes() - counted
        for kind, start, end in (
            ("forward", began, forward),
            ("backward", forward, backward),
            ("optimizer", backward, ended),
        ):
            self._timer.note(kind, self.num_steps, start, end)
        self._timer.note("iteration", self.num_steps, began, ended, sent_bytes=sent)
        self.num_steps += 1
        self._until = ended
        return loss

    def _progress(self, seconds: float) -> None:
        """Record the training time so far; rank 0 reports it."""
        took_ms = (seconds - self.seconds) * 1e3
        self.seconds = seconds
        if dist.get_rank() == 0:
            tell(Progress(self._number, self.num_steps, took_ms, self._loss, self._wire_bytes, seconds))

    def _mean_losses(self, losses: list[torch.Tensor]) -> list[float | None]:
        """The mean loss of every step, over all ranks."""
        summed = torch.stack(losses).to(torch.float64)
        dist.all_reduce(summed)
        # JSON has no NaN.
        means = (summed / dist.get_world_size()).tolist()
        return [loss if self._task.learns and math.isfinite(loss) else None for loss in means]

    def _agree_on_seconds(self) -> None:
        """Take the longest time of all ranks, so that all ranks agree on which contenders continue."""
        longest = torch.tensor(self.seconds, dtype=torch.float64, device=self._device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        self.seconds = longest.item()

    def _counted_bytes(self) -> int:
        return self._session.traffic.sent_bytes() if self._session is not None else 0

    def _predicted_bytes(self) -> int | None:
        """Predicted bytes of a step; for torch DDP those of the equivalent strategy, for its hooks None."""
        if self._session is not None:
            return self._session.predicted_bytes_per_step()
        if self.strategy == NO_COMMUNICATION:
            return 0
        if self.strategy != TORCH_DDP:
            return None
        tensors = [TensorSpec.of(name, parameter) for name, parameter in self._model.named_parameters()]
        return Strategy.parse("ddp").wire_bytes_per_step(tensors, dist.get_world_size())


def _torch_ddp(model: nn.Module, name: str) -> DistributedDataParallel:
    """Torch's own DDP, plain or with one of its communication hooks."""
    if name == TORCH_HOOKS["powersgd"]:
        # With more than one bucket this hook issues operations in the order in which they finish, which breaks Gloo.
        wrapped = DistributedDataParallel(model, init_sync=False, bucket_cap_mb=1 << 20)
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return wrapped
    wrapped = DistributedDataParallel(model, init_sync=False)
    link = link_from_environment(os.environ)  # attach reads it by itself
    if name == TORCH_HOOKS["fp16"]:
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif link is not None:
        pace_ddp(wrapped, link)
    return wrapped


def _kernel_sent_bytes() -> int | None:
    """Bytes sent through the network interface of this rank's host, if it has one; divided among its ranks."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface is None:
        return None
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == interface:
            return int(numbers.split()[8]) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return None
