"""Strong scaling of a model of 175 billion parameters with Megatron-LM and with MegaScale, on up to 12,288 GPUs.

Both systems use tp=8 pp=8, 6 groups of layers per stage, micro-batches of one sequence, selective recomputation. Two
numbers are found from two rows of Megatron-LM: the speed of products, and seconds per step that do not become fewer
with more GPUs (the input pipeline, and whatever else all ranks wait for). MegaScale differs in what its paper lists:
parallel transformer blocks (attention and feed-forward part side by side), which have one normalization and one pair of
exchanges instead of two; sliding-window attention, with a window taken to be half the sequence; overlapped exchanges of
the tensor, data and pipeline dimensions; and an input pipeline that no rank waits for. No row of MegaScale was used.

Reference: Jiang et al. 2024, MegaScale, NSDI, arXiv:2402.15627, Table 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from laconic.errors import ConfigurationError
from laconic.simulator.parallel.accelerator import A100
from laconic.simulator.parallel.fabric import a100_nodes
from laconic.simulator.parallel.plan import Plan
from laconic.simulator.parallel.software import Software
from laconic.simulator.parallel.step import step_time
from laconic.simulator.parallel.system import Job, System
from laconic.simulator.reference.calibration import solve_decreasing
from laconic.simulator.reference.published import PublishedTable, Row
from laconic.workload.transformer_presets import gpt

_MODEL = gpt("megascale-175b", hidden=12_288, layers=96, heads=128)
_SEQUENCE, _TP, _PP, _INTERLEAVE = 2048, 8, 8, 6
_PEAK_TFLOPS = 312.0
_MEGATRON = Software(
    name="Megatron-LM, 2023",
    overlaps_tensor_backward=True,
    scatter_gather=True,
    gradient_bytes=4,
)
_MEGASCALE = replace(
    _MEGATRON,
    name="MegaScale",
    attention_window=_SEQUENCE // 2,
    parallel_blocks=True,
    tensor_overlap=0.8,
    overlaps_gradients=True,
    overlaps_parameters=True,
    overlaps_pipeline=True,
)


class MegaScale(PublishedTable):
    """Table 2 of the MegaScale paper."""

    name = "megascale"
    source = (
        "Jiang et al. 2024, MegaScale (NSDI), arXiv:2402.15627, Table 2: 175B on Ampere GPUs, 8 x 200 Gbit/s per node."
    )
    columns = ("batch", "system", "gpus")
    measured = ("iter_s", "ktokens_per_s", "mfu_pct", "aggregate_pflops")
    calibrated_on = (
        "two rows of Megatron-LM (256 and 512 GPUs, batch 768) for the speed of products and a constant per step; "
        "none of MegaScale."
    )

    @cached_property
    def _found(self) -> tuple[float, float]:
        """The share of the peak that products reach, and the seconds per step that more GPUs do not reduce."""
        few, many = (Row(cells) for cells in self.carried_rows())
        gained_s = few.number("iter_s") - many.number("iter_s")
        share = solve_decreasing(
            lambda share: _iteration_s(few, share, 0.0) - _iteration_s(many, share, 0.0), gained_s, 0.4, 1.0
        )
        return share, max(0.0, few.number("iter_s") - _iteration_s(few, share, 0.0))

    def predict(self, row: Row) -> Mapping[str, float]:
        iteration_s = _iteration_s(row, *self._found)
        tokens = row.whole("batch") * _SEQUENCE
        # As MFU is usually counted, and as the published rows agree with: 6 N + 12 l h s per token.
        attention = 12 * _MODEL.num_hidden_layers * _MODEL.hidden_size * _SEQUENCE
        flops = tokens * (6.0 * _MODEL.num_parameters + attention)
        mfu = flops / iteration_s / row.whole("gpus") / 1e12 / _PEAK_TFLOPS
        return {
            "iter_s": iteration_s,
            "ktokens_per_s": tokens / iteration_s / 1e3,
            "mfu_pct": 100 * mfu,
            "aggregate_pflops": flops / iteration_s / 1e15,
        }

    def carried_rows(self) -> list[dict[str, str]]:
        rows = (("768", "Megatron-LM", "256", "40.0"), ("768", "Megatron-LM", "512", "21.2"))
        return [dict(zip((*self.columns, "iter_s"), cells, strict=True)) for cells in rows]


def _iteration_s(row: Row, share: float, constant_s: float) -> float:
    is_megascale = row.choice("system", ("Megatron-LM", "MegaScale")) == "MegaScale"
    software = _MEGASCALE if is_megascale else replace(_MEGATRON, step_s=constant_s)
    system = System(accelerator=replace(A100, matmul_share=share), fabric=a100_nodes(25e9), software=software)
    gpus = row.whole("gpus")
    if gpus % (_TP * _PP):
        raise row.problem("gpus", f"a multiple of tp x pp = {_TP * _PP}")
    plan = Plan(
        dp=gpus // (_TP * _PP),
        tp=_TP,
        pp=_PP,
        zero=1,
        schedule="interleaved",
        interleave=_INTERLEAVE,
        recompute="selective",
        sequence_parallel=True,
    )
    try:
        job = Job(model=_MODEL, sequence=_SEQUENCE, global_batch=row.whole("batch"))
        return step_time(job, plan, system).total_s
    except ConfigurationError as exc:
        raise row.located(exc) from exc
