"""vTrain's measurements with Megatron-DeepSpeed on up to 512 A100: data, tensor and pipeline parallelism.

The share of the peak that matrix products reach is found from one row. Everything else comes from elsewhere: costs of
the host and of kernels bound by memory from the same authors' runs on one node (`vtrain_single`), exchanges inside a
node from their all-reduce times, and from their configuration a NIC of 100 Gbit/s per GPU, 90% of which are taken to
be reached. Gradients are taken to be exchanged in 32 bits after the backward pass.

Reference: Bang et al. 2024, vTrain, MICRO, arXiv:2312.12391; VIA-Research/vTrain, data/ground_truth_multi.csv.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from laconic.errors import ConfigurationError
from laconic.simulator.parallel.accelerator import A100
from laconic.simulator.parallel.fabric import a100_nodes
from laconic.simulator.parallel.plan import Plan
from laconic.simulator.parallel.software import MEGATRON_2022
from laconic.simulator.parallel.step import step_time
from laconic.simulator.parallel.system import Job, System
from laconic.simulator.reference.calibration import solve_decreasing
from laconic.simulator.reference.published import PublishedTable, Row
from laconic.workload.transformer_presets import gpt

MEGATRON_DEEPSPEED = replace(
    MEGATRON_2022,
    name="Megatron-DeepSpeed",
    layer_launch_s=0.80e-3,
    wide_launch_s=1.02e-3,
    launch_norm=4.7,
    step_s=6e-3,
)
"""Costs of the host: fitted to every tenth row of the table of one node."""
_NIC_BYTES_PER_S = 12.5e9


class VTrain(PublishedTable):
    """Iteration times on several nodes."""

    name = "vtrain"
    source = "Bang et al. 2024, vTrain (MICRO), data/ground_truth_multi.csv: Megatron-DeepSpeed on nodes of 8 A100."
    columns = ("gpus", "global_batch", "micro_batch", "hidden", "heads", "layers", "seq", "tp", "dp", "pp")
    measured = ("iteration_ms",)
    carried_along = ("params_b",)
    calibrated_on = (
        "one row (3.6B, 64 GPUs, tp=1 dp=64 pp=1 micro_batch=8) for the share of the peak that products reach; costs "
        "of the host and of memory-bound kernels from a tenth of the rows of vtrain-single; all-reduces inside a node "
        "from vTrain's own table. That rings of 2 or 4 GPUs per node reach half of their NICs was concluded from the "
        "rows with tp=2 and tp=4."
    )

    @cached_property
    def system(self) -> System:
        """The hardware and software of the measurements."""
        row = Row(self.carried_rows()[0])

        def predicted(share: float) -> float:
            return iteration_ms(row, _system(share))

        return _system(solve_decreasing(predicted, row.number("iteration_ms"), 0.4, 1.0))

    def predict(self, row: Row) -> Mapping[str, float]:
        return {"iteration_ms": iteration_ms(row, self.system)}

    def carried_rows(self) -> list[dict[str, str]]:
        cells = ("64", "512", "8", "3072", "32", "30", "2048", "1", "64", "1", "3566.5")
        return [dict(zip((*self.columns, *self.measured), cells, strict=True))]


def _system(matmul_share: float) -> System:
    return System(
        accelerator=replace(A100, matmul_share=matmul_share),
        fabric=a100_nodes(_NIC_BYTES_PER_S),
        software=MEGATRON_DEEPSPEED,
    )


def iteration_ms(row: Row, system: System) -> float:
    """The time of one step of the configuration in a row."""
    job, plan = gpt_step(row)
    return 1e3 * step_time(job, plan, system).total_s


def gpt_step(row: Row) -> tuple[Job, Plan]:
    """The job and the plan that a row of vTrain's tables names."""
    sequence = row.whole("seq")
    model = gpt(
        "gpt", hidden=row.whole("hidden"), layers=row.whole("layers"), heads=row.whole("heads"), positions=sequence
    )
    plan = Plan(
        dp=row.whole("dp"),
        tp=row.whole("tp"),
        pp=row.whole("pp"),
        micro_batch=row.whole("micro_batch"),
        recompute="full",
    )
    try:
        plan.check(model, gpus=row.whole("gpus"), sequence=sequence)
        plan.num_micro_batches(row.whole("global_batch"))
    except ConfigurationError as exc:
        raise row.located(exc) from exc
    return Job(model=model, sequence=sequence, global_batch=row.whole("global_batch")), plan
