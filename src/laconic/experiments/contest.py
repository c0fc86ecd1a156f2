"""One rank of one contest: the same task under torch DDP and under laconic strategies, taking turns in one job.

Started once per rank as `python -m laconic.experiments.contest CONFIG.json`. All it finds out it writes as events; what
they mean is for laconic.report to say. Rank 0 also prints one JSON line per step for whoever watches.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from laconic.core.event import Event, EventList, EventLog, Scalar, TaggedEvents
from laconic.core.paced import link_from_environment
from laconic.core.paced_ddp import pace_ddp
from laconic.core.tensor import TensorSpec
from laconic.errors import LaconicError, one_line
from laconic.experiments.tasks import Task, TaskConfig, make_task
from laconic.report.results import NO_COMMUNICATION, TORCH_DDP, TORCH_HOOKS
from laconic.runtime import Session, attach
from laconic.strategy import Strategy

BLOCK_STEPS = 5
"""Steps of one contender before the next has its turn: a drift of the machine then favours none."""
_DETAILED_STEPS = 200
"""Later on, what happens inside a step is recorded for every tenth step only, so that files stay small."""
_DETAILS = frozenset({"forward", "backward", "optimizer", "wait", "encode", "decode", "exchange"})
_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class ContestConfig:
    """What every rank of a contest is told."""

    task: TaskConfig
    contenders: tuple[str, ...]
    """Strategy texts, or TORCH_DDP; all train the same model on the same batches."""
    steps: int | None
    """For each contender; None: as many as fit in `seconds`."""
    seconds: float | None
    """Training time of each contender; None: as long as `steps` take."""
    link: str
    """What the link is called in the events."""
    events: str
    """The file every rank appends its events to."""
    device: Literal["cpu", "cuda"]

    def write(self, path: Path) -> None:
        """Save for the ranks to read."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> ContestConfig:
        """Read what `write` saved."""
        document = json.loads(path.read_text(encoding="utf-8"))
        task, contenders = TaskConfig(**document.pop("task")), tuple(document.pop("contenders"))
        return cls(task=task, contenders=contenders, **document)


@dataclass(frozen=True)
class Progress:
    """One step of one contender, as rank 0 tells it to whoever watches."""

    contender: int
    step: int
    step_ms: float
    loss: float | None
    """Of the latest finished turn, mean over ranks; None before there is one, and where nothing is learnt."""
    wire_bytes: int | None
    """Sent per step in the latest finished turn, as the kernel counted or else the transport."""
    seconds: float
    """Training time of this contender so far."""

    def line(self) -> str:
        """As one line of output."""
        return json.dumps({"progress": asdict(self)})

    @classmethod
    def from_line(cls, line: str) -> Progress | None:
        """Read a line back; None if it is something else."""
        if not line.startswith('{"progress"'):
            return None
        return cls(**json.loads(line)["progress"])


class Contender:
    """One model under one strategy, trained a turn at a time."""

    def __init__(self, number: int, config: ContestConfig, task: Task, device: torch.device) -> None:
        self.strategy = config.contenders[number]
        self.num_steps = 0
        self.seconds = 0.0
        self._until_s = 0.0
        self._number = number
        self._task = task
        self._device = device
        self._buffer = EventList()
        self._events = TaggedEvents(self._buffer, strategy=self.strategy, link=config.link)
        self._model = task.model().to(device)
        self._optimizer = task.optimizer(self._model)
        self._session: Session | None = None
        self._forward: nn.Module = self._model
        if self.strategy in (TORCH_DDP, *TORCH_HOOKS.values()):
            self._forward = _torch_ddp(self._model, self.strategy)
        elif self.strategy != NO_COMMUNICATION:
            self._session = attach(
                self._model,
                self._optimizer,
                self.strategy,
                init_sync=False,
                timeout_s=_TIMEOUT_S,
                events=self._events,
            )
        self._loss: float | None = None
        self._wire_bytes: int | None = None

    def _now(self) -> float:
        """The time when everything issued so far is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _note(self, kind: str, began_s: float, ended_s: float, **data: Scalar) -> None:
        self._events.write(Event(kind, began_s, dist.get_rank(), self.num_steps, ended_s - began_s, {**data}))

    def _batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = self._task.batch(step, dist.get_rank())
        return inputs.to(self._device), targets.to(self._device)

    def _without_communication(self) -> AbstractContextManager[object]:
        if isinstance(self._forward, DistributedDataParallel):
            return self._forward.no_sync()
        return nullcontext() if self._session is None else self._session.accumulate()

    def _alone(self) -> None:
        """One forward and backward pass without communication, for what the others take beyond it."""
        inputs, targets = self._batch(0)
        began_s = self._now()
        with self._without_communication():
            self._task.loss(self._forward(inputs), targets).backward()
        self._note("alone", began_s, self._now())
        self._optimizer.zero_grad()

    def _iteration(self) -> torch.Tensor:
        """One training step; its loss on this rank."""
        inputs, targets = self._batch(self.num_steps)
        counted = self._counted_bytes()
        # Where the last step ended, not now: to ask a GPU for the time is to wait for what is still on its way there,
        # and that belongs to somebody's step.
        began_s = self._until_s
        loss = self._task.loss(self._forward(inputs), targets)
        forward_s = self._now()
        loss.backward()
        backward_s = self._now()
        self._optimizer.step()
        self._optimizer.zero_grad()
        ended_s = self._now()
        self._note("forward", began_s, forward_s)
        self._note("backward", forward_s, backward_s)
        self._note("optimizer", backward_s, ended_s)
        sent = None if self._session is None else self._counted_bytes() - counted
        self._note("iteration", began_s, ended_s, sent_bytes=sent)
        self.num_steps += 1
        self._until_s = ended_s
        self.seconds += ended_s - began_s
        if dist.get_rank() == 0:
            took_ms = (ended_s - began_s) * 1e3
            progress = Progress(self._number, self.num_steps, took_ms, self._loss, self._wire_bytes, self.seconds)
            print(progress.line(), flush=True)  # noqa: T201 - read by whoever started this rank
        return loss.detach()

    def turn(self, num_steps: int) -> list[Event]:
        """Some steps; what happened in them."""
        dist.barrier()
        self._alone()
        # What the kernel sent is read while nobody sends.
        dist.barrier()
        began_s, kernel_before = self._now(), _kernel_sent_bytes()
        self._until_s = began_s
        losses = torch.stack([self._iteration() for _ in range(num_steps)]).to(torch.float64)
        if self._session is not None:
            self._session.wait()  # the next one must not share the link with what this one has left on its way
        dist.barrier()
        ended_s, kernel_after = self._now(), _kernel_sent_bytes()
        kernel = None if kernel_before is None or kernel_after is None else kernel_after - kernel_before
        dist.all_reduce(losses)
        mean_losses = (losses / dist.get_world_size()).tolist()
        # JSON has no NaN.
        means = [loss if self._task.learns and math.isfinite(loss) else None for loss in mean_losses]
        longest = torch.tensor(self.seconds, dtype=torch.float64, device=self._device)
        # The same on every rank: it decides who goes on.
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        self.seconds = longest.item()
        recorded, self._buffer.events = self._buffer.events, []
        iterations = [event for event in recorded if event.kind == "iteration"]
        for event, loss in zip(iterations, means, strict=True):
            event.data["loss"] = loss
        counted = None if self._session is None else sum(int(event.data["sent_bytes"] or 0) for event in iterations)
        about: dict[str, Scalar] = {
            "strategy": self.strategy,
            "link": str(iterations[0].data["link"]),
            "num_steps": num_steps,
            "kernel_bytes": kernel,
            "counted_bytes": counted,
            "predicted_bytes": self._predicted_bytes(),
        }
        self._loss = means[-1]
        sent = counted if kernel is None else kernel
        self._wire_bytes = None if sent is None else sent // num_steps
        return [*recorded, Event("turn", began_s, dist.get_rank(), self.num_steps, ended_s - began_s, about)]

    def _counted_bytes(self) -> int:
        return self._session.traffic.sent_bytes() if self._session is not None else 0

    def _predicted_bytes(self) -> int | None:
        """Bytes a step should send; torch DDP's from the strategy that says the same, its hooks' from none."""
        if self._session is not None:
            return self._session.predicted_bytes_per_step()
        if self.strategy == NO_COMMUNICATION:
            return 0
        if self.strategy != TORCH_DDP:
            return None
        tensors = [TensorSpec.of(name, parameter) for name, parameter in self._model.named_parameters()]
        return Strategy.parse("ddp").wire_bytes_per_step(tensors, dist.get_world_size())

    def finish(self) -> list[Event]:
        """Take every hook off; what came to light after the last turn."""
        if self._session is not None:
            self._session.detach()
        return self._buffer.events


def _torch_ddp(model: nn.Module, name: str) -> DistributedDataParallel:
    """Torch's own, as it comes or with one of its communication hooks."""
    if name == TORCH_HOOKS["powersgd"]:
        # With more than one bucket this hook issues operations in whatever order they finish, and Gloo mixes them up.
        wrapped = DistributedDataParallel(model, init_sync=False, bucket_cap_mb=1 << 20)
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return wrapped
    wrapped = DistributedDataParallel(model, init_sync=False)
    link = link_from_environment(os.environ)  # attach looks there by itself
    if name == TORCH_HOOKS["fp16"]:
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif link is not None:
        pace_ddp(wrapped, link)
    return wrapped


def _kernel_sent_bytes() -> int | None:
    """Bytes sent through this rank's own network interface, if it has one."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface is None:
        return None
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == interface:
            return int(numbers.split()[8])
    return None


def hold(config: ContestConfig, log: EventLog) -> None:
    """Let all contenders train in the current process group, taking turns."""
    device = torch.device("cuda", torch.cuda.current_device()) if config.device == "cuda" else torch.device("cpu")
    task = make_task(config.task)
    contenders = [Contender(number, config, task, device) for number in range(len(config.contenders))]
    block, delay = _block_steps(config.contenders)

    def steps_left(contender: Contender) -> int:
        turn = block if contender.num_steps else block + delay
        if config.steps is not None:
            return min(turn, config.steps - contender.num_steps)
        assert config.seconds is not None
        return turn if contender.seconds < config.seconds else 0

    first = 0
    while any(steps_left(contender) for contender in contenders):
        # Another one begins each time, so that nobody always follows the same neighbour.
        for number in [(first + turn) % len(contenders) for turn in range(len(contenders))]:
            due = steps_left(contenders[number])
            if due:
                _record(log, contenders[number].turn(due))
        first += 1
    for contender in contenders:
        _record(log, contender.finish())


def _block_steps(contenders: Sequence[str]) -> tuple[int, int]:
    """Steps in a turn, and how many more in the first one.

    A turn is a whole period of whoever has the longest, and ends when nothing of theirs is on its way: a neighbour's
    turn must not pay for it, nor anybody's step be spared it.
    """
    ours = [name for name in contenders if name not in (TORCH_DDP, NO_COMMUNICATION, *TORCH_HOOKS.values())]
    rules = [Strategy.parse(name).synchronization for name in ours]
    period = max((rule.interval for rule in rules), default=0)
    return max(BLOCK_STEPS, period), max((rule.delay + 1 for rule in rules if rule.delay), default=0)


def _record(log: EventLog, events: list[Event]) -> None:
    for event in events:
        if event.kind not in _DETAILS or event.step < _DETAILED_STEPS or event.step % 10 == 0:
            log.write(event)


def main() -> int:
    """Run one rank."""
    config = ContestConfig.read(Path(sys.argv[1]))
    torch.set_num_threads(1)
    if config.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    try:
        dist.init_process_group("nccl" if config.device == "cuda" else "gloo")
    except (RuntimeError, ValueError) as exc:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        print(f"cannot start the process group at {where}: {one_line(exc)}", flush=True)  # noqa: T201
        return 2
    try:
        with EventLog(config.events) as log:
            hold(config, log)
    except LaconicError as exc:
        print(f"{type(exc).__name__}: {exc}", flush=True)  # noqa: T201
        return 2
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
