"""One rank of one training run: the small GPT on text, under torch DDP and under laconic strategies, taking turns.

Started once per rank as `python -m laconic.experiments.training CONFIG.json`; rank 0 writes the result.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from laconic.errors import LaconicError
from laconic.experiments.small_gpt import SmallGpt, gpt_shape
from laconic.experiments.text import TextBatches, load_text
from laconic.runtime import Session, attach

TORCH_DDP = "torch DDP"
"""The name under which torch's own DistributedDataParallel runs as the baseline."""
_BLOCK_STEPS = 5
"""Steps of one contender before the next has its turn: a drift of the machine then favours none."""
_WARM_STEPS = 2
"""First steps are left out of the times: memory is allocated and the order of gradients learnt there."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What one run does."""

    contenders: list[str]
    """Strategy texts, or TORCH_DDP; all train the same model on the same batches, taking turns."""
    steps: int
    size: str
    batch: int
    learning_rate: float
    seed: int
    data: str | None
    out: str

    def write(self, path: Path) -> None:
        """Save for the ranks to read."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> TrainingConfig:
        """Read what `write` saved."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What one contender measured, as rank 0 saw it; losses are means over ranks."""

    strategy: str
    step_ms: float
    step_ms_low: float
    step_ms_high: float
    exposed_ms: float
    wire_bytes_per_step: int | None
    """What the kernel counted on this rank's link, headers included; None without a link of its own."""
    counted_bytes_per_step: int | None
    """What laconic's transport counted in the last step; torch DDP has no count."""
    predicted_bytes_per_step: int | None
    losses: list[float]
    parameters: int


class Contender:
    """One model under one strategy, trained a block of steps at a time."""

    def __init__(self, strategy: str, config: TrainingConfig, batches: TextBatches) -> None:
        self.strategy = strategy
        self._batches = batches
        torch.manual_seed(config.seed)
        self._model = SmallGpt(gpt_shape(config.size))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=config.learning_rate)
        self._session: Session | None = None
        self._forward: nn.Module = self._model
        if strategy == TORCH_DDP:
            self._forward = DistributedDataParallel(self._model)
        else:
            self._session = attach(self._model, self._optimizer, strategy, timeout_s=60)
        self._alone_s: list[float] = []
        self._passes_s: list[float] = []
        self._steps_s: list[float] = []
        self._counted = 0
        self._wire: list[float] = []
        self.losses: list[float] = []

    def _without_communication(self) -> AbstractContextManager[object]:
        if isinstance(self._forward, DistributedDataParallel):
            return self._forward.no_sync()
        assert self._session is not None
        return self._session.accumulate()

    def _pass(self, step: int) -> torch.Tensor:
        tokens = self._batches.batch(step, dist.get_rank())
        logits = self._forward(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    def compute_alone(self) -> None:
        """One forward and backward pass without communication, for what the others take beyond it."""
        dist.barrier()
        began_s = time.perf_counter()
        with self._without_communication():
            self._pass(0)
        self._alone_s.append(time.perf_counter() - began_s)
        self._optimizer.zero_grad()

    def step(self) -> None:
        """One training step."""
        counted = self._counted_so_far()
        began_s = time.perf_counter()
        loss = self._pass(len(self.losses))
        self._passes_s.append(time.perf_counter() - began_s)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps_s.append(time.perf_counter() - began_s)
        self._counted = self._counted_so_far() - counted
        dist.all_reduce(loss)
        self.losses.append(loss.item() / dist.get_world_size())

    def block(self, num_steps: int) -> None:
        """Several steps; what the kernel sent for them is read while nobody sends."""
        dist.barrier()
        before = _kernel_sent_bytes()
        for _ in range(num_steps):
            self.step()
        dist.barrier()
        after = _kernel_sent_bytes()
        if before is not None and after is not None:
            self._wire.append((after - before) / num_steps)

    def _counted_so_far(self) -> int:
        return self._session.traffic.sent_bytes() if self._session is not None else 0

    @property
    def last_step_ms(self) -> float:
        """The time of the latest step."""
        return self._steps_s[-1] * 1e3

    def finish(self) -> TrainingResult:
        """Detach and say what was measured."""
        predicted = None
        if self._session is not None:
            predicted = self._session.predicted_bytes_per_step()
            self._session.detach()
        timed = self._steps_s[_WARM_STEPS:] or self._steps_s
        low, middle, high = statistics.quantiles(timed, n=4) if len(timed) > 1 else (timed[0],) * 3
        passes = self._passes_s[_WARM_STEPS:] or self._passes_s
        return TrainingResult(
            strategy=self.strategy,
            step_ms=middle * 1e3,
            step_ms_low=low * 1e3,
            step_ms_high=high * 1e3,
            exposed_ms=max(0.0, statistics.median(passes) - statistics.median(self._alone_s)) * 1e3,
            wire_bytes_per_step=round(statistics.median(self._wire)) if self._wire else None,
            counted_bytes_per_step=self._counted if self._session is not None else None,
            predicted_bytes_per_step=predicted,
            losses=self.losses,
            parameters=sum(parameter.numel() for parameter in self._model.parameters()),
        )


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


def train(config: TrainingConfig) -> list[TrainingResult]:
    """Train all contenders in the current process group, taking turns."""
    window = gpt_shape(config.size).context + 1
    batches = TextBatches(load_text(config.data), batch=config.batch, window=window, seed=config.seed)
    contenders = [Contender(strategy, config, batches) for strategy in config.contenders]
    first = 0
    while len(contenders[0].losses) < config.steps:
        due = min(_BLOCK_STEPS, config.steps - len(contenders[0].losses))
        # Another one begins each time, so that nobody always follows the same neighbour.
        for number in [(first + turn) % len(contenders) for turn in range(len(contenders))]:
            contenders[number].compute_alone()
            contenders[number].block(due)
            if dist.get_rank() == 0:
                done = contenders[number]
                line = (
                    f"contender {number} step {len(done.losses)} loss {done.losses[-1]:.4f} {done.last_step_ms:.1f} ms"
                )
                print(line, flush=True)  # noqa: T201 - read by whoever started this rank
        first += 1
    return [contender.finish() for contender in contenders]


def main() -> int:
    """Run one rank."""
    config = TrainingConfig.read(Path(sys.argv[1]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        results = train(config)
    except LaconicError as exc:
        print(f"{type(exc).__name__}: {exc}", flush=True)  # noqa: T201
        return 2
    if dist.get_rank() == 0:
        Path(config.out).write_text(json.dumps([asdict(result) for result in results]), encoding="utf-8")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
