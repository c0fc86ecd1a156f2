"""Weak scaling of Megatron-Core from 1.7 to 462 billion parameters on up to 6,144 H100.

    teraflops per GPU = operations of the model, nothing recomputed, all of the attention's scores / (step * GPUs)

Reference: NVIDIA/Megatron-LM, README and images/model_table.png (Megatron-Core 0.8, July 2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from laconic.errors import ConfigurationError
from laconic.simulator.parallel.accelerator import H100
from laconic.simulator.parallel.fabric import h100_nodes
from laconic.simulator.parallel.plan import Plan
from laconic.simulator.parallel.software import MEGATRON_CORE
from laconic.simulator.parallel.system import Job, System
from laconic.simulator.reference.calibration import solve_decreasing
from laconic.simulator.reference.megatron_rows import fastest_s
from laconic.simulator.reference.published import PublishedTable, Row
from laconic.workload.transformer_presets import gpt

_SEQUENCE, _VOCABULARY = 4096, 131_072
_PEAK_TFLOPS = 989.4


class MegatronH100(PublishedTable):
    """The table of the README."""

    name = "megatron-h100"
    source = "NVIDIA/Megatron-LM, README (Megatron-Core 0.8, 2024): H100 80 GB on Eos."
    columns = ("heads", "hidden", "layers", "tp", "pp", "dp", "gpus", "batch")
    measured = ("tflops_per_gpu", "mfu_pct", "aggregate_pflops")
    carried_along = ("model",)
    calibrated_on = (
        "the second row (7.1B on 96 GPUs) for the speed of products and of fused attention together; memory-bound "
        "kernels from MPT's H100 rows. Micro-batch and interleaving, which the table does not give, are the fastest "
        "that fit; 80% of the tensor-parallel exchanges are taken to be hidden."
    )

    @cached_property
    def system(self) -> System:
        """The hardware and software of the measurements."""
        row = Row(self.carried_rows()[0])
        target = -row.number("tflops_per_gpu")
        return _system(solve_decreasing(lambda factor: -_tflops(row, _system(factor)), target, 0.4, 1.35))

    def predict(self, row: Row) -> Mapping[str, float]:
        found = _tflops(row, self.system)
        return {
            "tflops_per_gpu": found,
            "mfu_pct": 100 * found / _PEAK_TFLOPS,
            "aggregate_pflops": found * row.whole("gpus") / 1e3,
        }

    def carried_rows(self) -> list[dict[str, str]]:
        cells = ("32", "4096", "30", "2", "1", "48", "96", "192", "465.9")
        return [dict(zip((*self.columns, "tflops_per_gpu"), cells, strict=True))]


def _system(factor: float) -> System:
    return System(accelerator=H100.scaled(factor), fabric=h100_nodes(50e9), software=MEGATRON_CORE)


def _tflops(row: Row, system: System) -> float:
    model = gpt(
        "gpt",
        hidden=row.whole("hidden"),
        layers=row.whole("layers"),
        heads=row.whole("heads"),
        vocabulary=_VOCABULARY,
        positions=_SEQUENCE,
    )
    gpus, tp, batch = (row.whole(key) for key in ("gpus", "tp", "batch"))
    job = Job(model=model, sequence=_SEQUENCE, global_batch=batch)
    try:
        plan = Plan(dp=row.whole("dp"), tp=tp, pp=row.whole("pp"), zero=1, sequence_parallel=tp > 1)
        plan.check(model, gpus=gpus, sequence=_SEQUENCE)
        step_s = fastest_s(job, plan, system, micro_batches=(1, 2, 4), interleaves=(1, 2, 3, 4, 6, 7, 8))
    except ConfigurationError as exc:
        raise row.located(exc) from exc
    return model.model_flops(job.tokens, _SEQUENCE, causal=False) / step_s / gpus / 1e12
