"""Iteration times with full and with selective recomputation and sequence parallelism, on A100.

Reference: Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198,
Table 5; execution settings as in calculon-ai/calculon.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from laconic.errors import ConfigurationError
from laconic.simulator.parallel.accelerator import A100
from laconic.simulator.parallel.fabric import a100_nodes
from laconic.simulator.parallel.plan import Plan, Recompute
from laconic.simulator.parallel.software import MEGATRON_2022
from laconic.simulator.parallel.step import step_time
from laconic.simulator.parallel.system import Job, System
from laconic.simulator.reference.calibration import solve_decreasing
from laconic.simulator.reference.published import PublishedTable, Row
from laconic.workload.transformer_presets import gpt

SELENE = a100_nodes(25e9)
"""NVIDIA's Selene: a NIC of 200 Gbit/s per GPU."""

_RECOMPUTE: dict[str, Recompute] = {
    "none": "none",
    "attn_only": "selective",
    "selective": "selective",
    "full": "full",
}


class Korthikanti(PublishedTable):
    """Table 5 of Korthikanti et al. 2022."""

    name = "korthikanti"
    source = "Korthikanti et al. 2022, arXiv:2205.05198, Table 5: Megatron-LM on Selene, A100 80 GB."
    columns = (
        "hidden", "heads", "layers", "seq", "tp", "pp", "dp", "batch", "micro_batch", "interleave", "recompute",
        "tp_comm"
    )  # fmt: skip
    measured = ("iteration_s",)
    carried_along = ("model",)
    calibrated_on = (
        "one row (175B, full recomputation) for the share of the peak that products reach; the bandwidth of "
        "memory-bound kernels from vtrain-single, all-reduces inside a node from vTrain's table."
    )

    @cached_property
    def system(self) -> System:
        """The hardware and software of the measurements."""
        row = Row(self.carried_rows()[0])
        share = solve_decreasing(lambda share: _iteration_s(row, _system(share)), row.number("iteration_s"), 0.4, 1.0)
        return _system(share)

    def predict(self, row: Row) -> Mapping[str, float]:
        return {"iteration_s": _iteration_s(row, self.system)}

    def carried_rows(self) -> list[dict[str, str]]:
        cells = ("12288", "96", "96", "2048", "8", "8", "1", "64", "1", "3", "full", "ar", "18.13")
        return [dict(zip((*self.columns, *self.measured), cells, strict=True))]


def _system(matmul_share: float) -> System:
    return System(accelerator=replace(A100, matmul_share=matmul_share), fabric=SELENE, software=MEGATRON_2022)


def _iteration_s(row: Row, system: System) -> float:
    sequence, batch = row.whole("seq"), row.whole("batch")
    model = gpt("gpt", hidden=row.whole("hidden"), layers=row.whole("layers"), heads=row.whole("heads"))
    interleave, tp = row.whole("interleave", empty=1), row.whole("tp")
    try:
        plan = Plan(
            dp=row.whole("dp"),
            tp=tp,
            pp=row.whole("pp"),
            micro_batch=row.whole("micro_batch"),
            schedule="interleaved" if interleave > 1 else "1f1b",
            interleave=interleave,
            recompute=_RECOMPUTE[row.choice("recompute", _RECOMPUTE)],
            sequence_parallel=row.choice("tp_comm", ("ar", "rs_ag")) == "rs_ag" and tp > 1,
        )
        return step_time(Job(model=model, sequence=sequence, global_batch=batch), plan, system).total_s
    except ConfigurationError as exc:
        raise row.located(exc) from exc
