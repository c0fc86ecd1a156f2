"""The vote that ends every unit: every member sends its ballot to all others once it has prepared the unit.

Each ballot goes straight to its receivers. An all-gather over Gloo would pass the ballots around a ring, so that the
last one arrives after as many hops as there are other members.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from laconic.core.exchange import Exchange, one_round
from laconic.core.transport import Transport
from laconic.errors import CommunicationError
from laconic.runtime.engine import Task
from laconic.runtime.job import Job

WHAT = "whether all ranks have everything"


class Ballot(NamedTuple):
    """The vote of one member."""

    unit: int
    """The unit that it has prepared."""
    wants_change: bool
    """It wants another view after this unit: it has been told to end, or knows of others that want to join."""
    speed: int
    """Thousandths of a sample per second; 0: unknown."""
    data: int
    """A number that stands for the samples that are divided, the same on all members; 0: unknown."""


class Result(NamedTuple):
    """What all members know after a vote."""

    ballots: dict[str, Ballot]
    raised: tuple[bool, ...]
    """For each flag, whether any member has raised it."""


class Vote:
    """One vote. Its ballots are sent after all exchanges that were submitted before it."""

    def __init__(
        self,
        job: Job,
        transport: Transport,
        members: Sequence[str],
        mine: Ballot,
        *,
        flags: Sequence[bool],
        what: str,
        prepared: Callable[[], None],
    ) -> None:
        """what: the unit's name. flags: as many on all members. prepared: called just before the ballot is sent."""
        self._job = job
        self._members = members
        self._mine = mine
        self._num_flags = len(flags)
        self._what = what
        numbers = torch.tensor([mine.unit, int(mine.wants_change), mine.speed, mine.data, _step(job), _rates(job)])
        own = torch.cat([numbers, torch.from_numpy(_words(flags))])
        self._rows = rows = torch.empty((transport.world_size, len(own)), dtype=torch.int64)

        def start() -> Exchange:
            prepared()
            ballots = own.expand_as(rows).contiguous()
            return one_round(transport.all_to_all(rows, ballots, purpose="control", what=WHAT))

        self._task = job.engine.submit(Task(WHAT, start, step=job.step, device=own.device))

    def result(self) -> Result:
        """Return once all members have prepared the unit; raises if they disagree on it."""
        self._job.engine.wait(self._task)
        mine, rows = self._mine, self._rows
        first_flags = rows.shape[1] - -(-self._num_flags // 64)
        said = rows[:, :first_flags].tolist()
        for name, (unit, _, _, data, step, rates) in zip(self._members, said, strict=True):
            if unit != mine.unit:
                raise CommunicationError(f"{self._what}: this rank is in unit {mine.unit}, worker {name} in {unit}.")
            if step != said[0][-2]:
                raise CommunicationError(
                    f"worker {name} is in step {step}, and worker {self._members[0]} in step {said[0][-2]}: they have "
                    "not loaded the same checkpoint. Load states that were saved together, on every rank or on none."
                )
            if rates != said[0][-1]:
                raise CommunicationError(
                    f"workers {name} and {self._members[0]} have different learning rates, so replicas would drift "
                    "apart. Give the scheduler to attach: elastic=Elastic(carry=[scheduler]). A loop that calls "
                    "scheduler.step() after each epoch begins at the epoch of the others: range(session.epoch, epochs)."
                )
            if data and mine.data and data != mine.data:
                raise CommunicationError(
                    f"worker {name} divides other samples than this one: some would be used twice, and others never. "
                    "Call session.batches() with the same data set, batch_size, seed and epochs on every rank."
                )
        ballots = {
            name: Ballot(unit, bool(wants), speed, data)
            for name, (unit, wants, speed, data, *_) in zip(self._members, said, strict=True)
        }
        return Result(ballots, _flags(np.bitwise_or.reduce(rows[:, first_flags:].numpy(), axis=0), self._num_flags))


def to_text(flags: Sequence[bool]) -> str:
    """A number in hexadecimal. The bitwise or of two such numbers has the flags of both."""
    return _words(flags).tobytes().hex() or "0"


def of_text(text: str, count: int) -> tuple[bool, ...]:
    """What `to_text` wrote for so many flags."""
    return _flags(np.frombuffer(bytes.fromhex(text.zfill(16 * -(-count // 64))), dtype=np.int64), count)


def _words(flags: Sequence[bool]) -> npt.NDArray[np.int64]:
    """The flags in numbers of 64 bits."""
    bits = np.zeros(-(-len(flags) // 64) * 64, dtype=np.bool_)
    bits[: len(flags)] = flags
    return np.packbits(bits, bitorder="little").view(np.int64)


def _flags(words: npt.NDArray[np.int64], count: int) -> tuple[bool, ...]:
    bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=count)
    return tuple(bits.astype(np.bool_).tolist())


def _step(job: Job) -> int:
    """The step, where ranks make the same number of steps: one that has loaded another checkpoint is in another."""
    return 0 if job.strategy.synchronization.deadline_s is not None else job.step


def _rates(job: Job) -> int:
    """A number that stands for the learning rates, where they must be the same on all ranks."""
    if not job.strategy.exchanges_gradients():
        return 0
    return zlib.crc32(repr([float(group["lr"]) for group in job.param_groups]).encode())
