"""The vote that ends every unit: one small all-gather, which completes when all members have prepared the unit."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from laconic.core.exchange import one_round
from laconic.core.transport import Transport
from laconic.errors import CommunicationError
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


def vote(job: Job, transport: Transport, members: Sequence[str], mine: Ballot, what: str) -> dict[str, Ballot]:
    """The ballots of all members, once all have prepared the unit called `what`; raises if they disagree on it."""
    own = torch.tensor([mine.unit, int(mine.wants_change), mine.speed, _rates(job)], dtype=torch.int64)
    rows = torch.empty((transport.world_size, len(own)), dtype=torch.int64)
    job.engine.call(
        WHAT,
        lambda: one_round(transport.all_gather(rows, own, purpose="control", what=WHAT)),
        step=job.step,
        device=own.device,
    )
    said = rows.tolist()
    for name, (unit, _, _, rates) in zip(members, said, strict=True):
        if unit != mine.unit:
            raise CommunicationError(f"{what}: this rank is in unit {mine.unit}, worker {name} in {unit}.")
        if rates != said[0][3]:
            raise CommunicationError(
                f"workers {name} and {members[0]} have different learning rates, so replicas would drift apart. Give "
                "the scheduler to attach: elastic=Elastic(carry=[scheduler])."
            )
    return {name: Ballot(unit, bool(wants), speed) for name, (unit, wants, speed, _) in zip(members, said, strict=True)}


def _rates(job: Job) -> int:
    """A number that stands for the learning rates, where they must be the same on all ranks."""
    if not job.strategy.exchanges_gradients():
        return 0
    return zlib.crc32(repr([float(group["lr"]) for group in job.param_groups]).encode())
