"""One training: who trains, how, and what came of it; as JSON between the benchmark and its ranks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

DDP = "torch DDP"
"""Its curve comes from one process that adds up the gradients of all ranks; its step time from ranks behind a link."""
HOOKS = {"torch DDP, bf16 hook": "bf16", "torch DDP, fp16 hook": "fp16", "torch DDP, PowerSGD hook": "powersgd"}
DILOCO_BY_HAND = "DiLoCo by hand"
"""A few lines without laconic."""
AUTO = "auto"
"""How a contender begins that chooses its strategy during training."""
WITHOUT_LACONIC = (DDP, DILOCO_BY_HAND, *HOOKS)


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that decides how a training comes out and what it takes."""

    contender: str
    """A strategy, or one of the names above; `Contender` reads it."""
    link: str
    """Of every rank, as 1gbit; empty: one process alone, on the batches of all ranks."""
    steps: int
    """The learning rate falls to zero over so many."""
    made: int
    """Steps really made; fewer than `steps`: only times are wanted."""
    rate: float
    warmup: float = 0.05
    """The share of the steps in which the rate rises."""
    seed: int = 0
    ranks: int = 4
    size: str = "gpt2"
    context: int = 1024
    batch: int = 8
    """Windows per rank and step."""
    device: Literal["cpu", "cuda"] = "cuda"
    compiled: Literal["none", "model", "blocks"] = "model"
    """What goes through torch.compile. A compiled model hands over all gradients at the end of its backward pass; with
    compiled blocks, those of one block travel while the next one computes."""
    text: str = ""
    """A digest of the tokens: losses on other text cannot be compared. Empty where only times are wanted."""

    @property
    def evaluates(self) -> bool:
        """Whether its losses are wanted."""
        return self.made == self.steps


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a job."""

    job: Job
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    """On files never trained on, after so many steps; with the averaged model at the end."""
    seconds: tuple[float, ...]
    """Training time until then, without looking at the loss."""
    step_s: float
    """Wall clock over all steps but the first, which allocates and compiles."""
    sent_bytes: int
    """Through the link of one rank, with all headers, per step; 0: nobody counted."""
    payload_bytes: int
    """What laconic counted, per step; 0: it was not there."""
    memory_bytes: int
    """The most that one rank had allocated on its GPU."""
    mps: bool = False
    decisions: tuple[tuple[int, str, str], ...] = ()
    """Of auto: step, strategy, reason."""

    def reached_s(self, loss: float) -> float | None:
        """Training time until the loss was at most this."""
        found = zip(self.seconds, self.losses, strict=True)
        return next((seconds for seconds, seen in found if seen <= loss), None)


def write(path: Path, record: Job | Outcome) -> None:
    """As one JSON document."""
    path.write_text(json.dumps(asdict(record)), encoding="utf-8")


def read_job(path: Path) -> Job:
    """What `write` wrote."""
    return Job(**json.loads(path.read_text(encoding="utf-8")))


def outcome(text: str) -> Outcome:
    """From a line of JSON."""
    record = json.loads(text)
    job = Job(**record.pop("job"))
    steps, losses, seconds = (tuple(record.pop(name)) for name in ("steps", "losses", "seconds"))
    decisions = tuple((step, strategy, reason) for step, strategy, reason in record.pop("decisions", ()))
    return Outcome(job=job, steps=steps, losses=losses, seconds=seconds, decisions=decisions, **record)
