"""Every legal plan for a model and a number of GPUs, the fastest that fit first.

Degrees are divisors of the number of GPUs; tensor parallelism stays within a node. Plans that do not fit into memory
are not timed. One plan takes well below a millisecond, because layers that equal each other are computed once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from laconic.errors import ConfigurationError
from laconic.simulator.parallel.memory import Memory, fits, memory
from laconic.simulator.parallel.plan import Plan, Schedule
from laconic.simulator.parallel.step import Exchange, StepTime, step_time
from laconic.simulator.parallel.system import Job, System

_MICRO_BATCHES = (1, 2, 4, 8)
_INTERLEAVES = (2, 4)
_MOST_CONTEXT = 16


@dataclass(frozen=True)
class Found:
    """A plan that fits, its time and its memory."""

    plan: Plan
    time: StepTime
    memory: Memory

    def tokens_per_s(self, job: Job) -> float:
        """Tokens per second of all GPUs together."""
        return job.tokens / self.time.total_s


@dataclass(frozen=True)
class Searched:
    """The result of a search."""

    best: tuple[Found, ...]
    """The fastest plans, the fastest first."""
    tried: int
    fitting: int

    def __post_init__(self) -> None:
        if not self.tried:
            raise ConfigurationError("no plan is legal for this model, batch and number of GPUs.")


def plans(job: Job, gpus: int, *, gpus_per_node: int = 8, zeros: tuple[int, ...] = (0, 1, 3)) -> Iterator[Plan]:
    """Every legal plan; `zeros` are the degrees of sharding to try."""
    model = job.model
    for tp in _divisors(gpus, most=gpus_per_node):
        if model.num_attention_heads % tp:
            continue
        for pp in _divisors(gpus // tp, most=model.num_hidden_layers):
            for cp in _divisors(gpus // tp // pp, most=_MOST_CONTEXT):
                dp = gpus // tp // pp // cp
                if job.sequence % (cp * tp) or job.global_batch % dp:
                    continue
                for shape in _with_experts(Plan(dp=dp, tp=tp, pp=pp, cp=cp, sequence_parallel=tp > 1), job):
                    yield from _variants(shape, job, zeros)


def _with_experts(plan: Plan, job: Job) -> Iterator[Plan]:
    if not job.model.is_mixture:
        yield plan
        return
    for ep in _divisors(plan.stage_gpus, most=job.model.num_experts):
        if job.model.num_experts % ep == 0:
            yield replace(plan, ep=ep)


def _variants(plan: Plan, job: Job, zeros: tuple[int, ...]) -> Iterator[Plan]:
    layers = job.model.num_hidden_layers
    schedules: list[tuple[Schedule, int]] = [("1f1b", 1)]
    if plan.pp > 1:
        schedules.append(("zero_bubble", 1))
        for groups in _INTERLEAVES:
            if plan.pp * groups <= layers:
                schedules.append(("interleaved", groups))
    for micro_batch in _MICRO_BATCHES:
        if job.global_batch % (plan.dp * micro_batch):
            continue
        for schedule, interleave in schedules:
            for recompute in ("none", "selective", "full"):
                for zero in zeros if plan.dp * plan.cp > 1 else (0,):
                    yield replace(
                        plan,
                        micro_batch=micro_batch,
                        schedule=schedule,
                        interleave=interleave,
                        recompute=recompute,
                        zero=zero,
                    )


def _divisors(number: int, *, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def search(
    job: Job,
    gpus: int,
    system: System,
    *,
    keep: int = 6,
    exchange: Exchange | None = None,
    zeros: tuple[int, ...] = (0, 1, 3),
) -> Searched:
    """The `keep` fastest plans that fit, with `zeros` as degrees of sharding.

    With an `exchange`, plans are unsharded (zero=0), and the fastest ones without it are timed again with it, because
    an exchange by a strategy takes a simulation of its own.
    """
    zeros = zeros if exchange is None else (0,)
    tried = fitting = 0
    found: list[tuple[tuple[float, int, int], int, Found]] = []
    for plan in plans(job, gpus, gpus_per_node=system.fabric.gpus_per_node, zeros=zeros):
        tried += 1
        needed = memory(job, plan, system.software)
        if exchange is not None and fits(needed, system):
            kept = exchange.kept_bytes(job, plan, system)
            needed = memory(job, plan, system.software, residual_bytes=kept)
        if not fits(needed, system):
            continue
        fitting += 1
        time = step_time(job, plan, system)
        rank = _order(time, plan)
        entry = ((-rank[0], -rank[1], -rank[2]), -tried, Found(plan, time, needed))
        if len(found) < (keep if exchange is None else 4 * keep):
            heapq.heappush(found, entry)
        else:
            heapq.heappushpop(found, entry)
    best = [entry[-1] for entry in found]
    if exchange is not None:
        best = [replace(one, time=step_time(job, one.plan, system, exchange=exchange)) for one in best]
    best.sort(key=lambda one: _order(one.time, one.plan))
    return Searched(tuple(best[:keep]), tried, fitting)


def _order(time: StepTime, plan: Plan) -> tuple[float, int, int]:
    """A sort key: the faster first; within a thousandth, the plan that divides sequences, then shards, the least."""
    return round(math.log(time.total_s), 3), plan.cp, plan.zero
