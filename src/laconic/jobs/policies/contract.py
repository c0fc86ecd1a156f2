"""The contract of a policy: its inputs and its decision."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, cast

from laconic.cluster.fabric import Floats, Indices
from laconic.jobs.job import Job
from laconic.jobs.pool import PLACEMENT_RULES, PlacementRule
from laconic.settings import Method, choice


@dataclass(frozen=True, kw_only=True, eq=False)
class View:
    """The jobs that are present when a round is planned; arrays have one entry per job."""

    now_s: float
    num_gpus: int
    """Of the cluster, without those of inference services; at least one."""
    round_s: float
    has_changed: bool
    """Whether jobs have come, ended or changed their speed, or num_gpus is another, since the last plan."""
    number: Indices
    """The numbers of these jobs, in order of arrival."""
    jobs: Sequence[Job]
    """All jobs of the trace, by number."""
    gpus: Indices
    """GPUs that each job asks for."""
    age_s: Floats
    """Seconds since its arrival."""
    left_s: Floats
    """Remaining time on its GPUs at its current speed."""
    speed: Floats
    """Its speed when it ran last, relative to all its GPUs on one host; a guess if it never ran."""
    steps_per_s: Floats
    """Optimizer steps per second, as the job counts them."""
    received_s: Floats
    """The time for which it has had GPUs so far."""
    done: Floats
    """Share of its work that is done."""


@dataclass(frozen=True, eq=False)
class Turn:
    """The plan of the next round."""

    order: Indices
    """Positions in the view, in the order in which jobs get GPUs; a job that does not fit is skipped."""
    gpus: Indices
    """By position in the view: the number of GPUs a job gets if there is room; 0: none in this round."""


class Chooser(Protocol):
    """A running policy, with its state from round to round."""

    def choose(self, view: View) -> Turn:
        """Plan the next round."""
        ...


@dataclass(frozen=True, kw_only=True)
class Policy(Method):
    """Decides which jobs get GPUs in the next round."""

    axis: ClassVar[str] = "policy"
    interleaves: ClassVar[bool] = False
    """Whether jobs on one link take turns."""
    migrates: ClassVar[bool] = False
    """Whether jobs move to fewer hosts or racks as soon as there is room, if the rest of their work is long enough."""
    chooses_strategies: ClassVar[bool] = False
    """Whether it chooses how each job exchanges gradients."""

    placement: str = choice("pack", "first", "spread", "racks")
    """How hosts are chosen for a job: pack, first, spread or racks."""

    @property
    def placement_rule(self) -> PlacementRule:
        """The placement for the pool."""
        assert self.placement in PLACEMENT_RULES
        return cast(PlacementRule, self.placement)

    def speed(self, job: Job, gpus: int) -> float:
        """The speed of a job on this many GPUs, relative to the number it asks for."""
        return job.speed_on(gpus)

    @abstractmethod
    def start(self) -> Chooser:
        """Start on a new cluster."""
        ...
