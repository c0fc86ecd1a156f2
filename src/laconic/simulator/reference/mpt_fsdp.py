"""MPT models under FSDP alone, from 125 million to 70 billion parameters, on A100 and H100.

    MFU = (6 N + 12 l h s) * tokens/s per GPU / peak,      the table's formula

For each kind of GPU four numbers are fitted to four or five rows on 8 GPUs: the shares of the peak that products and
fused attention reach, further passes over memory per layer, and how much compute loses while parameters are gathered.
Rows with more than 8 GPUs are predicted: nothing was fitted to them.

Reference: mosaicml/llm-foundry, scripts/train/benchmarking/README.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from laconic.simulator.parallel.accelerator import A100, H100, Accelerator
from laconic.simulator.parallel.fabric import Fabric, a100_nodes, h100_nodes
from laconic.simulator.parallel.plan import Plan
from laconic.simulator.parallel.software import Software
from laconic.simulator.parallel.step import step_time
from laconic.simulator.parallel.system import Job, System
from laconic.simulator.reference.published import PublishedTable, Row
from laconic.workload.transformer_presets import gpt

_SHAPES = {
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "760m": (1536, 12, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}
"""Width, heads, layers."""
_VOCABULARY = 50_368
_EIGHT_BIT_RATE = 1.5
"""As fitted to torchtitan's rows."""


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """One kind of GPU in the table."""

    device: Accelerator
    fabric: Fabric
    extra_passes: float
    interference: float
    """Share of the time of overlapped all-gathers and reduce-scatters that compute loses to interference."""
    peak: float
    has_eight_bit: bool = False


_KINDS = {
    "a100_80gb": _Kind(
        device=replace(A100, matmul_share=0.829, memory_share=0.75, attention_share=0.305),
        fabric=a100_nodes(25e9),
        extra_passes=17.3,
        interference=0.72,
        peak=312e12,
    ),
    "a100_40gb": _Kind(
        device=replace(
            A100,
            memory_bytes_per_s=1.555e12,
            memory_bytes=40e9,
            matmul_share=0.827,
            memory_share=0.75,
            attention_share=0.329,
        ),
        fabric=a100_nodes(25e9),
        extra_passes=11.4,
        interference=1.0,
        peak=312e12,
    ),
    "h100_80gb": _Kind(
        device=replace(H100, matmul_share=0.673, memory_share=0.75, attention_share=0.174),
        fabric=h100_nodes(50e9),
        extra_passes=15.1,
        interference=0.76,
        peak=989.4e12,
        has_eight_bit=True,
    ),
}


class MptFsdp(PublishedTable):
    """The benchmark tables of llm-foundry."""

    name = "mpt-fsdp"
    source = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md: PyTorch FSDP on 8 GPUs per node."
    columns = (
        "model", "seq", "gpus", "gpu", "micro_batch", "grad_accum", "precision", "sharding", "act_ckpt"
    )  # fmt: skip
    measured = ("mfu_pct", "hfu_pct", "tflops_per_gpu", "tokens_per_s", "tokens_per_s_gpu")
    carried_along = ("table", "global_batch", "act_offload", "params")
    calibrated_on = (
        "rows on 8 GPUs: five of A100 80 GB, four of A100 40 GB, five of H100 (1b, 3b, 7b and 13b at sequences of "
        "1,024 to 32,768 tokens), four numbers for each kind. No row on several nodes. Rows with 8-bit numbers: the "
        "rate of torchtitan's."
    )

    def predict(self, row: Row) -> Mapping[str, float]:
        sequence, gpus = row.whole("seq"), row.whole("gpus")
        hidden, heads, layers = _SHAPES[row.choice("model", _SHAPES)]
        model = gpt("mpt", hidden=hidden, layers=layers, heads=heads, vocabulary=_VOCABULARY, positions=sequence)
        kind = _KINDS[row.choice("gpu", _KINDS)]
        eight_bit = row.choice("precision", ("amp_bf16", "bf16", "amp_fp8")) == "amp_fp8"
        sharding = row.choice("sharding", ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"))
        if eight_bit and not kind.has_eight_bit:
            raise row.problem("precision", f"amp_bf16 or bf16, since {row['gpu']} does not multiply 8-bit floats")
        recomputes = row.flag("act_ckpt")
        if row.flag("act_offload", empty=False):
            row.assume("act_offload", "as if activations stayed on the GPU")
        software = Software(
            name="FSDP",
            extra_passes=kind.extra_passes,
            interference=kind.interference,
            exchanges_every_micro_batch=True,
            overlaps_gradients=True,
            overlaps_parameters=True,
            gradient_bytes=4,
            optimizer_bytes=36.0,
            weight_product_rate=_EIGHT_BIT_RATE if eight_bit else 1.0,
            step_s=5e-3,
        )
        plan = Plan(
            dp=gpus,
            zero={"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}[sharding],
            micro_batch=row.whole("micro_batch"),
            recompute="full" if recomputes else "none",
        )
        sequences = gpus * row.whole("micro_batch") * row.whole("grad_accum")
        job = Job(model=model, sequence=sequence, global_batch=sequences)
        system = System(accelerator=kind.device, fabric=kind.fabric, software=software)
        step_s = step_time(job, plan, system).total_s
        rate = job.tokens / step_s / gpus
        tflops = rate * (6.0 * model.num_parameters + 12.0 * layers * hidden * sequence) / 1e12
        mfu = 100 * tflops * 1e12 / (kind.peak * (2 if eight_bit else 1))
        return {
            "mfu_pct": mfu,
            "hfu_pct": mfu * (4 / 3 if recomputes else 1),
            "tflops_per_gpu": tflops,
            "tokens_per_s": rate * gpus,
            "tokens_per_s_gpu": rate,
        }

    def carried_rows(self) -> list[dict[str, str]]:
        rows = (
            ("a100_80gb", "7b", "2048", "6", "2", "96", "amp_bf16", "False", "64.23"),
            ("a100_80gb", "13b", "1024", "40", "3", "960", "amp_bf16", "True", "59.48"),
            ("a100_80gb", "13b", "2048", "2", "3", "48", "amp_bf16", "False", "59.57"),
            ("a100_80gb", "1b", "2048", "14", "4", "448", "amp_bf16", "False", "59.86"),
            ("a100_80gb", "1b", "32768", "1", "4", "32", "amp_bf16", "False", "55.52"),
            ("a100_40gb", "7b", "2048", "12", "4", "384", "bf16", "True", "50.92"),
            ("a100_40gb", "3b", "2048", "5", "8", "320", "bf16", "False", "57.82"),
            ("a100_40gb", "1b", "2048", "8", "8", "512", "bf16", "False", "56.23"),
            ("a100_40gb", "1b", "32768", "1", "4", "32", "bf16", "True", "45.07"),
            ("h100_80gb", "7b", "2048", "6", "1", "48", "amp_bf16", "False", "46.44"),
            ("h100_80gb", "13b", "1024", "40", "3", "960", "amp_bf16", "True", "44.27"),
            ("h100_80gb", "13b", "2048", "2", "1", "16", "amp_bf16", "False", "39.79"),
            ("h100_80gb", "1b", "2048", "14", "1", "112", "amp_bf16", "False", "41.82"),
            ("h100_80gb", "1b", "32768", "1", "4", "32", "amp_bf16", "False", "33.54"),
        )
        columns = (
            "gpu",
            "model",
            "seq",
            "micro_batch",
            "grad_accum",
            "global_batch",
            "precision",
            "act_ckpt",
            "mfu_pct",
        )
        return [{"gpus": "8", "sharding": "FULL_SHARD", **dict(zip(columns, cells, strict=True))} for cells in rows]
