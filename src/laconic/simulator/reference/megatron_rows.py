"""The micro-batch and interleaving that tables of Megatron's weak scaling leave out, chosen as the authors would.

Of the choices that fit into memory the fastest is taken; where none fits, the one that needs the least memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from laconic.errors import ConfigurationError
from laconic.simulator.parallel.memory import fits, memory
from laconic.simulator.parallel.plan import Plan
from laconic.simulator.parallel.step import StepTime, step_time
from laconic.simulator.parallel.system import Job, System


def fastest_s(
    job: Job, plan: Plan, system: System, *, micro_batches: Iterable[int], interleaves: Iterable[int] = (1,)
) -> float:
    """Seconds of a step with the best micro-batch and interleaving."""
    found: list[tuple[bool, float, StepTime]] = []
    groups = tuple(interleaves)
    for micro_batch in micro_batches:
        if job.global_batch % (plan.dp * micro_batch):
            continue
        for interleave in groups if plan.pp > 1 else (1,):
            if interleave > 1 and job.model.num_hidden_layers % (plan.pp * interleave):
                continue
            schedule = "interleaved" if interleave > 1 else "1f1b"
            tried = replace(plan, micro_batch=micro_batch, interleave=interleave, schedule=schedule)
            time = step_time(job, tried, system)
            needed = memory(job, tried, system.software)
            fitting = fits(needed, system)
            found.append((not fitting, time.total_s if fitting else needed.total, time))
    if not found:
        raise ConfigurationError(f"a batch of {job.global_batch} sequences is not divisible by dp={plan.dp}.")
    return min(found, key=lambda one: one[:2])[2].total_s


def replicas(gpus: int, tp: int, pp: int) -> int:
    """dp, where a table gives the number of GPUs."""
    if gpus % (tp * pp):
        raise ConfigurationError(f"tp x pp = {tp * pp} does not divide {gpus} GPUs.")
    return gpus // (tp * pp)
