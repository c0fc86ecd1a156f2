"""One rank of one training run: the small GPT on text, under torch DDP or under a laconic strategy.

Started once per rank as `python -m laconic.experiments.training CONFIG.json`; rank 0 writes the result.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from contextlib import AbstractContextManager, nullcontext
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
_COMPUTE_STEPS = 4
"""Steps without communication, to know what computing alone takes."""
_WARM_STEPS = 2
"""First steps are left out of the times: memory is allocated and the order of gradients learnt there."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What one run does."""

    strategy: str
    """Strategy text, or TORCH_DDP."""
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
    """What one run measured, as rank 0 saw it; losses are means over ranks."""

    strategy: str
    step_ms: float
    step_ms_low: float
    step_ms_high: float
    compute_ms: float
    wire_bytes_per_step: int | None
    predicted_bytes_per_step: int | None
    losses: list[float]
    parameters: int


def train(config: TrainingConfig) -> TrainingResult:
    """Train in the current process group."""
    rank = dist.get_rank()
    shape = gpt_shape(config.size)
    torch.manual_seed(config.seed)
    model = SmallGpt(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    batches = TextBatches(load_text(config.data), batch=config.batch, window=shape.context + 1, seed=config.seed)
    session: Session | None = None
    forward: nn.Module = model
    if config.strategy == TORCH_DDP:
        forward = DistributedDataParallel(model)
    else:
        session = attach(model, optimizer, config.strategy, timeout_s=60)

    def without_communication() -> AbstractContextManager[object]:
        if isinstance(forward, DistributedDataParallel):
            return forward.no_sync()
        return session.accumulate() if session is not None else nullcontext()

    def backward(step: int) -> torch.Tensor:
        tokens = batches.batch(step, rank)
        logits = forward(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    compute_s: list[float] = []
    for step in range(_COMPUTE_STEPS):
        dist.barrier()
        began_s = time.perf_counter()
        with without_communication():
            backward(step)
        compute_s.append(time.perf_counter() - began_s)
        optimizer.zero_grad()

    step_s: list[float] = []
    losses: list[float] = []
    sent = 0
    for step in range(config.steps):
        before = session.traffic.sent_bytes() if session is not None else 0
        began_s = time.perf_counter()
        loss = backward(step)
        optimizer.step()
        optimizer.zero_grad()
        step_s.append(time.perf_counter() - began_s)
        sent = session.traffic.sent_bytes() - before if session is not None else 0
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
        if rank == 0:
            print(f"step {step + 1} loss {losses[-1]:.4f} {step_s[-1] * 1e3:.1f} ms", flush=True)  # noqa: T201
    predicted = session.predicted_bytes_per_step() if session is not None else None
    if session is not None:
        session.detach()
    timed = step_s[_WARM_STEPS:] or step_s
    low, middle, high = statistics.quantiles(timed, n=4) if len(timed) > 1 else (timed[0],) * 3
    return TrainingResult(
        strategy=config.strategy,
        step_ms=middle * 1e3,
        step_ms_low=low * 1e3,
        step_ms_high=high * 1e3,
        compute_ms=statistics.median(compute_s) * 1e3,
        wire_bytes_per_step=sent if session is not None else None,
        predicted_bytes_per_step=predicted,
        losses=losses,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def main() -> int:
    """Run one rank."""
    config = TrainingConfig.read(Path(sys.argv[1]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        result = train(config)
    except LaconicError as exc:
        print(f"{type(exc).__name__}: {exc}", flush=True)  # noqa: T201
        return 2
    if dist.get_rank() == 0:
        Path(config.out).write_text(json.dumps(asdict(result)), encoding="utf-8")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
