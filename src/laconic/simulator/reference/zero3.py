"""ZeRO-3 without model parallelism compared with pipeline, tensor and data parallelism, on up to 2,240 A100.

ZeRO-3 of DeepSpeed in 2021 gathers each tensor of a layer by itself (12 in a GPT's), in the forward and again in the
backward pass, and scatters its gradient. The rows given show that compute hides none of it: a step takes longer than
its compute by the time of these exchanges at one rate, which is the same for both models and is found from these rows.
The share of the peak that products reach is found from the row without ZeRO.

Reference: Narayanan et al. 2021, SC21, arXiv:2104.04473, Table 2; Rajbhandari et al. 2020, arXiv:1910.02054.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from laconic.errors import ConfigurationError
from laconic.simulator.parallel.accelerator import A100
from laconic.simulator.parallel.plan import Plan
from laconic.simulator.parallel.software import MEGATRON_2021
from laconic.simulator.parallel.step import step_time
from laconic.simulator.parallel.system import Job, System
from laconic.simulator.reference.calibration import solve_decreasing
from laconic.simulator.reference.korthikanti import SELENE
from laconic.simulator.reference.megatron_a100 import SEQUENCE, paper_flops
from laconic.simulator.reference.megatron_rows import fastest_s, replicas
from laconic.simulator.reference.published import PublishedTable, Row
from laconic.workload.transformer_presets import gpt

_MODELS = {
    174.6: gpt("gpt3-175b", hidden=12_288, layers=96, heads=96),
    529.6: gpt("gpt-530b", hidden=20_480, layers=105, heads=128),
}
_ROUNDED = 0.01
"""Sizes are also written as 175 and 530."""
_TP = 8
_TOKENS = 300e9
_DAY_S = 86_400.0
_TENSORS_PER_LAYER = 12
_DEEPSPEED = replace(MEGATRON_2021, name="DeepSpeed ZeRO-3", shard_messages=_TENSORS_PER_LAYER)


class Zero3(PublishedTable):
    """Table 2 of Narayanan et al. 2021."""

    name = "zero3"
    source = "Narayanan et al. 2021 (SC21), arXiv:2104.04473, Table 2: DeepSpeed ZeRO-3 and Megatron-LM on Selene."
    columns = ("scheme", "params_b", "model_parallel", "batch", "gpus", "micro_batch")
    measured = ("tflops_per_gpu", "days_300b_tokens")
    calibrated_on = (
        "three rows: PTD-P (174.6B, 384 GPUs) for the share of the peak that products reach; ZeRO-3 with 174.6B on 384 "
        "and with 529.6B on 640 GPUs for one rate of its exchanges."
    )

    @cached_property
    def matmul_share(self) -> float:
        """The share of the peak that products reach."""
        row = Row(self.carried_rows()[2])
        return solve_decreasing(
            lambda share: -self._tflops(row, share, SELENE.between_bytes_per_s), -row.number("tflops_per_gpu"), 0.4, 1.0
        )

    @cached_property
    def shard_bytes_per_s(self) -> float:
        """The rate per GPU of ZeRO-3's all-gathers and reduce-scatters."""
        rows = [Row(cells) for cells in self.carried_rows()[:2]]

        def above(rate: float) -> float:
            return -math.fsum(
                math.log(self._tflops(row, self.matmul_share, rate) / row.number("tflops_per_gpu")) for row in rows
            )

        return solve_decreasing(above, 0.0, 1e9, 400e9)

    def predict(self, row: Row) -> Mapping[str, float]:
        found = self._tflops(row, self.matmul_share, self.shard_bytes_per_s)
        params, gpus = row.number("params_b") * 1e9, row.whole("gpus")
        return {"tflops_per_gpu": found, "days_300b_tokens": 8 * _TOKENS * params / (gpus * found * 1e12) / _DAY_S}

    def _tflops(self, row: Row, matmul_share: float, rate: float) -> float:
        params = row.number("params_b")
        near = min(_MODELS, key=lambda known: abs(known - params))
        if abs(params / near - 1) > _ROUNDED:
            raise row.problem("params_b", " or ".join(map(str, _MODELS)))
        model = _MODELS[near]
        batch, gpus, micro_batch = (row.whole(key) for key in ("batch", "gpus", "micro_batch"))
        job = Job(model=model, sequence=SEQUENCE, global_batch=batch)
        device = replace(A100, matmul_share=matmul_share)
        try:
            if row.choice("scheme", ("ZeRO-3", "PTD-P")) == "ZeRO-3":
                if row.whole("model_parallel", empty=1) != 1:
                    raise row.problem("model_parallel", "1, as ZeRO-3 runs without model parallelism")
                # One rate for the whole ring, whatever it is limited by.
                fabric = replace(SELENE, inside_bytes_per_s=rate, between_bytes_per_s=rate)
                system = System(accelerator=device, fabric=fabric, software=_DEEPSPEED)
                plan = Plan(dp=gpus, zero=3, micro_batch=micro_batch, recompute="full")
                step_s = step_time(job, plan, system).total_s
            else:
                split = row.whole("model_parallel")
                if split % _TP:
                    raise row.problem("model_parallel", f"a multiple of {_TP}")
                plan = Plan(dp=replicas(gpus, _TP, split // _TP), tp=_TP, pp=split // _TP, recompute="full")
                system = System(accelerator=device, fabric=SELENE, software=MEGATRON_2021)
                step_s = fastest_s(job, plan, system, micro_batches=(micro_batch,), interleaves=(1, 2, 3, 4))
        except ConfigurationError as exc:
            raise row.located(exc) from exc
        return paper_flops(model, batch) / step_s / gpus / 1e12

    def carried_rows(self) -> list[dict[str, str]]:
        rows = (
            ("ZeRO-3", "174.6", "1", "1536", "384", "4", "144"),
            ("ZeRO-3", "529.6", "1", "2560", "640", "4", "138"),
            ("PTD-P", "174.6", "96", "1536", "384", "1", "153"),
        )
        return [dict(zip((*self.columns, "tflops_per_gpu"), cells, strict=True)) for cells in rows]
