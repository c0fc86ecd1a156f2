"""Qwen3 mixtures of experts with Megatron-Core on H100: tensor, expert, pipeline and context parallelism.

The two given rows differ only in whether the tokens' all-to-all overlaps with compute. From the first the speed of
products and of fused attention is found, from the second the share of the all-to-all that the overlap hides. Modules
named in `recompute` that are bound by memory (norm, act) cost little to repeat and are not counted; `moe` and `mlp`
repeat the larger part of a layer.

Reference: yanring/Megatron-MoE-ModelZoo, best_practice/qwen3/readme.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from laconic.errors import ConfigurationError
from laconic.simulator.parallel.accelerator import H100
from laconic.simulator.parallel.fabric import h100_nodes
from laconic.simulator.parallel.plan import Plan, Recompute
from laconic.simulator.parallel.software import MEGATRON_CORE
from laconic.simulator.parallel.step import step_time
from laconic.simulator.parallel.system import Job, System
from laconic.simulator.reference.calibration import solve_decreasing
from laconic.simulator.reference.megatron_rows import replicas
from laconic.simulator.reference.published import PublishedTable, Row
from laconic.workload.transformer_presets import MODELS

_MODELS = {"Qwen3-235B-A22B": MODELS["qwen3-235b-a22b"], "Qwen3-30B-A3B": MODELS["qwen3-30b-a3b"]}
_DISPATCHERS = {"deepep": True, "hybridep": True, "alltoall": False, "a2a": False}
"""Dispatchers in lower case, and whether a token crosses the network once for all its experts in a node."""
_LARGE_MODULES = {"moe", "mlp"}
_SMALL_MODULES = {
    *("norm", "layernorm", "act", "moe_act", "core_attn", "mla_up_proj", "up_proj", "shared_experts", "router"),
    *("none", "selective"),
}
"""As Megatron-Core's --recompute-modules and the model zoo name them."""


class Qwen3Moe(PublishedTable):
    """The best practices of the model zoo."""

    name = "qwen3-moe"
    source = "yanring/Megatron-MoE-ModelZoo, best_practice/qwen3: Megatron-Core on H100, 400 Gbit/s per GPU."
    columns = (
        "model", "dispatcher", "gpus", "seq", "tp", "cp", "ep", "pp", "vpp", "fsdp", "micro_batch",
        "global_batch", "recompute", "note",
    )  # fmt: skip
    measured = ("step_s", "tflops_per_gpu")
    carried_along = ("dp",)
    calibrated_on = (
        "both rows given (235B on 256 GPUs): the speed of products, and the share of the all-to-all that is hidden "
        "where a note says that it overlaps."
    )

    @cached_property
    def _found(self) -> tuple[float, float]:
        """The speed of products, and the hidden share of the all-to-all."""
        plain, overlapped = (Row(cells) for cells in self.carried_rows())
        factor = solve_decreasing(lambda factor: _step(plain, factor, 0.0)[0], plain.number("step_s"), 0.2, 1.35)
        hidden = solve_decreasing(lambda share: _step(overlapped, factor, share)[0], overlapped.number("step_s"), 0, 1)
        return factor, hidden

    def predict(self, row: Row) -> Mapping[str, float]:
        step_s, flops = _step(row, *self._found)
        return {"step_s": step_s, "tflops_per_gpu": flops / step_s / row.whole("gpus") / 1e12}

    def carried_rows(self) -> list[dict[str, str]]:
        cells = (
            "Qwen3-235B-A22B",
            "DeepEP",
            "256",
            "4096",
            "2",
            "1",
            "32",
            "8",
            "4",
            "",
            "1",
            "2048",
            "norm,act",
        )
        plain = dict(zip(self.columns, (*cells, ""), strict=True))
        overlap = "+1f1b overlap of all-to-all"
        return [{**plain, "step_s": "19.7"}, {**plain, "note": overlap, "step_s": "17.6"}]


def _step(row: Row, factor: float, hidden: float) -> tuple[float, float]:
    """Seconds of a step, and its operations."""
    model = _MODELS[row.choice("model", _MODELS)]
    interleave, pp, tp, cp = (row.whole(key, empty=1) for key in ("vpp", "pp", "tp", "cp"))
    gpus, sequence = row.whole("gpus"), row.whole("seq")
    fsdp = _is_sharded(row)
    interleaved = pp > 1 and interleave > 1
    recompute = _recompute(row)
    software = replace(
        MEGATRON_CORE,
        tokens_once_per_node=_tokens_once_per_node(row),
        expert_overlap=hidden if "overlap" in row["note"].lower() else 0.0,
        selective_share=0.6,
    )
    try:
        plan = Plan(
            dp=replicas(gpus, tp * cp, pp),
            tp=tp,
            cp=cp,
            ep=row.whole("ep", empty=1),
            pp=pp,
            zero=3 if fsdp else 1,
            micro_batch=row.whole("micro_batch"),
            schedule="interleaved" if interleaved else "1f1b",
            interleave=interleave if interleaved else 1,
            recompute=recompute,
            sequence_parallel=tp > 1,
        )
        plan.check(model, gpus=gpus, sequence=sequence)
        job = Job(model=model, sequence=sequence, global_batch=row.whole("global_batch"))
        system = System(accelerator=H100.scaled(factor), fabric=h100_nodes(50e9), software=software)
        return step_time(job, plan, system).total_s, model.model_flops(job.tokens, sequence)
    except ConfigurationError as exc:
        raise row.located(exc) from exc


def _is_sharded(row: Row) -> bool:
    """Whether parameters are sharded: the cell has the number of shards, of which 1 is none, or yes or no."""
    try:
        return row.whole("fsdp", least=0, empty=1) > 1
    except ConfigurationError:
        if row["fsdp"].lower() not in ("true", "false", "yes", "no"):
            row.assume("fsdp", "with sharded parameters")
            return True
        return row.flag("fsdp")


def _recompute(row: Row) -> Recompute:
    modules = {module for module in re.split(r"[\s,;+/]+", row["recompute"].lower()) if module}
    unknown = modules - _LARGE_MODULES - _SMALL_MODULES - {"full"}
    if unknown and not row.is_empty("recompute"):
        row.assume("recompute", f"as if {', '.join(sorted(unknown))} took no time")
    if "full" in modules:
        return "full"
    return "selective" if modules & _LARGE_MODULES else "none"


def _tokens_once_per_node(row: Row) -> bool:
    name = row["dispatcher"].lower().replace("-", "").replace("_", "")
    if name not in _DISPATCHERS:
        raise row.problem("dispatcher", "DeepEP, HybridEP or AllToAll")
    return _DISPATCHERS[name]
