"""Llama 3.1 with torchtitan on H100 and H200: FSDP2, tensor, pipeline and context parallelism; tokens/s and memory.

Four numbers are fitted: the shares of the peak that products and fused attention reach on these H100 (500 W), how much
faster products with 8-bit numbers are, and the passes over memory that `torch.compile` saves. H200 differs in memory
alone, and is not limited in power: its products are taken to be as fast as on other H100 (MPT's rows).

What the table does not say is taken from torchtitan's defaults of that time: as many micro-batches as pipeline stages,
two groups of layers per stage with an interleaved schedule, consecutive parts of a sequence on context-parallel ranks,
sequence parallelism with tensor parallelism, sharded parameters gathered once per step with pipeline stages.

Reference: Liang et al. 2024, TorchTitan, arXiv:2410.06511; pytorch/torchtitan, benchmarks/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from laconic.errors import ConfigurationError
from laconic.simulator.parallel.accelerator import H100
from laconic.simulator.parallel.fabric import h100_nodes
from laconic.simulator.parallel.memory import memory
from laconic.simulator.parallel.plan import Plan, Recompute, Schedule
from laconic.simulator.parallel.software import Software
from laconic.simulator.parallel.step import step_time
from laconic.simulator.parallel.system import Job, System
from laconic.simulator.reference.published import PublishedTable, Row
from laconic.workload.transformer_presets import MODELS

_MODELS = {f"llama3.1-{size}": MODELS[f"llama3-{size.lower()}"] for size in ("8B", "70B", "405B")}
_MODELS |= {name.replace("3.1", "3"): model for name, model in _MODELS.items()}

MATMUL_SHARE, ATTENTION_SHARE, EIGHT_BIT_RATE, UNCOMPILED_PASSES = 0.48, 0.34, 1.5, 28.0
"""Fitted to four rows."""
_RECOMPUTE: dict[str, Recompute] = {"none": "none", "selective": "selective", "full": "full"}
_H200_MATMUL_SHARE = 0.67
_ASYNC_OVERLAP = 0.6
"""Share of tensor-parallel exchanges that asynchronous tensor parallelism is taken to hide."""
_SOFTWARE = Software(
    name="torchtitan",
    balances_context=False,
    selective_share=0.4,
    overlaps_gradients=True,
    overlaps_parameters=True,
    overlaps_pipeline=True,
    gradient_bytes=4,
    parameter_bytes=4,
    stored_gradient_bytes=4,
    state_bytes=8,
    logit_bytes=14,
    optimizer_bytes=36,
)


class Torchtitan(PublishedTable):
    """The tables of torchtitan's benchmarks."""

    name = "torchtitan"
    source = "pytorch/torchtitan, benchmarks/ (2024-12 to 2025-06): H100 96 GB at 500 W, and H200; 400 Gbit/s per GPU."
    columns = (
        "set", "model", "gpus", "fsdp", "tp", "pp", "cp", "seq", "local_batch", "precision", "compile", "async_tp",
        "schedule", "act_ckpt",
    )  # fmt: skip
    measured = ("tps_per_gpu", "memory_gib")
    carried_along = ("global_batch",)
    calibrated_on = (
        "four rows (8B on 8 GPUs: bf16, bf16 compiled, float8 at 8,192 tokens, float8 at 262,144 tokens with cp=8) for "
        "four numbers; of memory, nothing but the allocator's 6%."
    )

    def predict(self, row: Row) -> Mapping[str, float]:
        model = _MODELS[row.choice("model", _MODELS)]
        system = _system(row)
        fsdp, tp, pp, cp = (row.whole(key, empty=1) for key in ("fsdp", "tp", "pp", "cp"))
        gpus, local_batch = row.whole("gpus"), row.whole("local_batch")
        schedule, interleave = _schedule(row)
        replicas, rest = divmod(gpus, fsdp * tp * pp * cp)
        if replicas > 1 and not rest:
            fsdp *= replicas
            row.assume("fsdp", f"as sharding over {fsdp} ranks instead of {replicas} replicas")
        micro_batch = max(1, local_batch // pp)
        if local_batch % micro_batch:
            micro_batch = 1
            row.assume("local_batch", "with micro-batches of one sequence")
        try:
            plan = Plan(
                dp=fsdp,
                tp=tp,
                pp=pp,
                cp=cp,
                zero=3,
                micro_batch=micro_batch,
                schedule=schedule,
                interleave=interleave,
                recompute=_RECOMPUTE[row.choice("act_ckpt", _RECOMPUTE)],
                sequence_parallel=tp > 1,
            )
            plan.check(model, gpus=gpus, sequence=row.whole("seq"))
            job = Job(model=model, sequence=row.whole("seq"), global_batch=local_batch * fsdp)
            time = step_time(job, plan, system)
        except ConfigurationError as exc:
            raise row.located(exc) from exc
        needed = memory(job, plan, system.software).total_gib * system.software.allocator_factor
        return {"tps_per_gpu": job.tokens / time.total_s / plan.gpus, "memory_gib": needed}

    def carried_rows(self) -> list[dict[str, str]]:
        rows = (
            ("8", "1", "8192", "2", "bf16", "0", "selective", "5762", "82.4"),
            ("8", "1", "8192", "2", "bf16", "1", "selective", "6667", "77.0"),
            ("8", "1", "8192", "2", "float8", "1", "selective", "8532", "76.8"),
            ("1", "8", "262144", "1", "float8", "1", "full", "548", "84.5"),
        )
        columns = ("fsdp", "cp", "seq", "local_batch", "precision", "compile", "act_ckpt", *self.measured)
        fixed = {"set": "llama3_h100_202412", "model": "llama3.1-8B", "gpus": "8", "tp": "1", "pp": "1"}
        more = {"async_tp": "0", "schedule": ""}
        return [{**fixed, **more, **dict(zip(columns, cells, strict=True))} for cells in rows]


def _schedule(row: Row) -> tuple[Schedule, int]:
    """The schedule and the groups of layers per stage."""
    name = row["schedule"].lower().replace(" ", "").replace("_", "")
    if "zerobubble" in name:
        if name != "zerobubble":
            row.assume("schedule", "with one group of layers per stage")
        return "zero_bubble", 1
    if "interleaved" in name:
        return "interleaved", 2
    if not row.is_empty("schedule") and "1f1b" not in name:
        row.assume("schedule", "as 1F1B")
    return "1f1b", 1


def _system(row: Row) -> System:
    eight_bit = row.choice("precision", ("bf16", "float8", "float8_rowwise", "float8_tensorwise")) != "bf16"
    compiled = row.flag("compile")
    software = replace(
        _SOFTWARE,
        weight_product_rate=EIGHT_BIT_RATE if eight_bit else 1.0,
        extra_passes=0.0 if compiled else UNCOMPILED_PASSES,
        tensor_overlap=_ASYNC_OVERLAP if row.flag("async_tp", empty=False) else 0.0,
    )
    if "h200" in row["set"].lower():
        device = replace(
            H100, name="H200", memory_bytes_per_s=4.8e12, memory_bytes=141e9, matmul_share=_H200_MATMUL_SHARE
        )
    else:
        device = replace(H100, memory_bytes_per_s=2.4e12, memory_bytes=96e9, matmul_share=MATMUL_SHARE)
    device = replace(device, attention_share=ATTENTION_SHARE)
    return System(accelerator=device, fabric=h100_nodes(50e9), software=software)
