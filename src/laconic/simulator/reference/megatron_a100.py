"""Weak scaling of Megatron-LM from 1.7 to 1,008 billion parameters on up to 3,072 A100.

    teraflops per GPU = 96 B s l h^2 (1 + s / 6h + V / 16lh) / (step * GPUs),      the paper's formula

Reference: Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters, SC21, arXiv:2104.04473,
Table 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from laconic.errors import ConfigurationError
from laconic.simulator.parallel.accelerator import A100
from laconic.simulator.parallel.plan import Plan
from laconic.simulator.parallel.software import MEGATRON_2021
from laconic.simulator.parallel.system import Job, System
from laconic.simulator.reference.calibration import solve_decreasing
from laconic.simulator.reference.korthikanti import SELENE
from laconic.simulator.reference.megatron_rows import fastest_s, replicas
from laconic.simulator.reference.published import PublishedTable, Row
from laconic.workload.transformer import Transformer
from laconic.workload.transformer_presets import gpt

SEQUENCE, VOCABULARY = 2048, 51_200
_PEAK_TFLOPS = 312.0


class MegatronA100(PublishedTable):
    """Table 1 of Narayanan et al. 2021."""

    name = "megatron-a100"
    source = "Narayanan et al. 2021 (SC21), arXiv:2104.04473, Table 1: Megatron-LM on Selene, A100 80 GB."
    columns = ("heads", "hidden", "layers", "tp", "pp", "gpus", "batch")
    measured = ("tflops_per_gpu", "pct_of_peak", "aggregate_pflops")
    carried_along = ("params_b",)
    calibrated_on = (
        "the first row (1.7B on 32 GPUs) for the share of the peak that products reach; memory-bound kernels from "
        "vtrain-single, all-reduces inside a node from vTrain's table. Micro-batch and interleaving, which the table "
        "does not give, are the fastest that fit."
    )

    @cached_property
    def system(self) -> System:
        """The hardware and software of the measurements."""
        row = Row(self.carried_rows()[0])
        target = -row.number("tflops_per_gpu")
        return _system(solve_decreasing(lambda share: -_tflops(row, _system(share)), target, 0.4, 1.0))

    def predict(self, row: Row) -> Mapping[str, float]:
        found = _tflops(row, self.system)
        return {
            "tflops_per_gpu": found,
            "pct_of_peak": 100 * found / _PEAK_TFLOPS,
            "aggregate_pflops": found * row.whole("gpus") / 1e3,
        }

    def carried_rows(self) -> list[dict[str, str]]:
        cells = ("24", "2304", "24", "1", "1", "32", "512", "137")
        return [dict(zip((*self.columns, "tflops_per_gpu"), cells, strict=True))]


def _system(matmul_share: float) -> System:
    return System(accelerator=replace(A100, matmul_share=matmul_share), fabric=SELENE, software=MEGATRON_2021)


def paper_flops(model: Transformer, batch: int) -> float:
    """Operations of one step as the paper counts them, recomputation included."""
    hidden, layers = model.hidden_size, model.num_hidden_layers
    more = SEQUENCE / (6 * hidden) + VOCABULARY / (16 * layers * hidden)
    return 96.0 * batch * SEQUENCE * layers * hidden**2 * (1 + more)


def _tflops(row: Row, system: System) -> float:
    model = gpt("gpt", hidden=row.whole("hidden"), layers=row.whole("layers"), heads=row.whole("heads"))
    gpus, tp, pp, batch = (row.whole(key) for key in ("gpus", "tp", "pp", "batch"))
    try:
        plan = Plan(dp=replicas(gpus, tp, pp), tp=tp, pp=pp, recompute="full")
        job = Job(model=model, sequence=SEQUENCE, global_batch=batch)
        step_s = fastest_s(job, plan, system, micro_batches=(1, 2, 4, 8, 16), interleaves=(1, 2, 3, 4))
    except ConfigurationError as exc:
        raise row.located(exc) from exc
    return paper_flops(model, batch) / step_s / gpus / 1e12
