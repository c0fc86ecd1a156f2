"""Messages from the ranks of a contest to the process that started them: one JSON object per line of output."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Progress:
    """One step of one contender, from rank 0."""

    kind: ClassVar[str] = "progress"

    contender: int
    step: int
    step_ms: float
    """The time as seen by the host of rank 0; a GPU may lag behind."""
    loss: float | None
    """Loss of the latest finished turn, averaged over ranks; None before the first, and for replayed compute."""
    wire_bytes: int | None
    """Bytes per step in the latest finished turn, as counted by the kernel or else by the transport."""
    seconds: float
    """Training time of this contender so far."""


@dataclass(frozen=True)
class Refusal:
    """A contender that does not take part, from rank 0."""

    kind: ClassVar[str] = "refusal"

    contender: int
    reason: str


@dataclass(frozen=True)
class Failure:
    """Why a rank ends before the contest does."""

    kind: ClassVar[str] = "failure"

    rank: int
    time_s: float
    """A time of the machine's monotonic clock, which all ranks share: the earliest failure is the cause of the
    others."""
    error: str


Message = Progress | Refusal | Failure
_KINDS: dict[str, type[Message]] = {message.kind: message for message in (Progress, Refusal, Failure)}


def tell(message: Message) -> None:
    """Print one message."""
    print(json.dumps({message.kind: asdict(message)}), flush=True)  # noqa: T201 - read by the starting process


def read(line: str) -> Message | None:
    """The message in a line of output; None if the line is something else."""
    for kind, message in _KINDS.items():
        if line.startswith(f'{{"{kind}": {{'):
            return message(**json.loads(line)[kind])
    return None
