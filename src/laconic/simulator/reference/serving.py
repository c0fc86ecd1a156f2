"""Measured serving: vLLM, SGLang and TensorRT-LLM, aggregated and disaggregated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from laconic.errors import ConfigurationError, UsageError
from laconic.simulator.reference.inferencemax import LENGTHS, SHORTEST, recipe
from laconic.simulator.reference.published import Likeness, PublishedTable, Row
from laconic.simulator.serving.deployment import Deployment, Precision
from laconic.simulator.serving.devices import DEVICES, serving_device
from laconic.simulator.serving.forward import ForwardPass
from laconic.simulator.serving.frameworks import FRAMEWORKS
from laconic.simulator.serving.latency import Served, aggregated, disaggregated
from laconic.simulator.serving.load import Load
from laconic.simulator.serving.models import served_model
from laconic.workload.transformer import Transformer

_PRECISIONS = {
    **{"": "bf16", "bf16": "bf16", "fp16": "bf16", "fp8": "fp8"},
    **{"fp4": "fp4", "nvfp4": "fp4", "mxfp4": "fp4", "int4": "int4"},
}

_MOST_WEIGHTS = 0.85
"""The largest share of a GPU's memory that weights may take, so that the KV cache also fits."""


_SGLANG_PASSES = 10.0
"""Passes before a first token, for rows of SGLang that are not from InferenceMAX."""


class Serving(PublishedTable):
    """Milliseconds to the first token and per output token."""

    name = "serving"
    source = (
        "NVIDIA aiconfigurator, silicon_sample.csv: measurements of vLLM, SGLang and TensorRT-LLM "
        "(github.com/ai-dynamo/aiconfigurator)"
    )
    columns = (
        *("backend", "model_path", "system", "precision", "mode", "isl", "osl", "concurrency", "batch_size", "tp_size"),
        *("attention_dp_size", "moe_tp_size", "moe_ep_size", "prefill_num_workers", "prefill_tp_size"),
        *("prefill_moe_ep_size", "decode_batch_size", "decode_num_workers", "decode_tp_size", "decode_moe_ep_size"),
    )
    measured = ("silicon_ttft_ms", "silicon_tpot_ms")
    carried_along = ("id", "measured", "backend_version")
    calibrated_on = (
        "a tenth of the given aggregated rows for the times on the host, per layer and sequence, for kernels between "
        "products, for the shares of the peak, for speculative decoding, and for the passes before a first token; "
        "disaggregated rows: nothing"
    )

    def predict(self, row: Row) -> Mapping[str, float]:
        """Milliseconds."""
        try:
            found = served(row)
        except ConfigurationError as exc:
            raise row.located(exc) from exc
        return {"silicon_ttft_ms": 1e3 * found.first_token_s, "silicon_tpot_ms": 1e3 * found.token_s}

    def likeness(self, row: Row) -> Likeness:
        """The deployment in words; the load and the degrees in numbers."""
        mode, load = row.choice("mode", ("agg", "disagg")), _load(row)
        if mode == "agg":
            degrees = _aggregated_degrees(row)
        else:
            degrees = tuple(
                _degree(row, column) for column in ("decode_tp_size", "prefill_tp_size", "decode_moe_ep_size")
            )
        return Likeness(
            mode,
            (row["backend"], _model(row).name, row["system"], _precision(row), row.get("backend_version", "")),
            (load.concurrency, load.input_tokens, load.output_tokens, *degrees),
        )


def served(row: Row) -> Served:
    """The predicted latencies of the deployment in a row."""
    mode = row.choice("mode", ("agg", "disagg"))
    load = _load(row)
    if mode == "agg":
        return aggregated(_forward(row, *_aggregated_degrees(row)), load)
    prefill = _worker(row, "prefill", _degree(row, "prefill_tp_size"))
    prefill_workers = _degree(row, "prefill_num_workers") if row["prefill_num_workers"] else None
    found = []
    for tp, decode_workers in _decode_choices(row):
        decode = _worker(row, "decode", tp)
        found.append(
            disaggregated(prefill, decode, load, prefill_workers=prefill_workers, decode_workers=decode_workers)
        )
    return min(found, key=lambda one: one.token_s)


def _precision(row: Row) -> Precision:
    return cast("Precision", _PRECISIONS[row.choice("precision", _PRECISIONS)])


def _load(row: Row) -> Load:
    # An empty cell, or 0: the measurement names the batch instead, or does not use that kind of parallelism.
    batch = row.whole("batch_size" if row["mode"] == "agg" else "decode_batch_size", empty=1)
    lengths = row.whole("isl"), row.whole("osl")
    # Outside of InferenceMAX, powers of two are lengths of a benchmark whose requests are all alike. They matter for
    # SGLang, where equal requests end together, and wait together.
    equal = row["backend"] == "sglang" and lengths not in LENGTHS and all(n & (n - 1) == 0 for n in lengths)
    return Load(
        input_tokens=lengths[0],
        output_tokens=lengths[1],
        concurrency=row.whole("concurrency", empty=batch),
        shortest=1.0 if equal else SHORTEST,
    )


def _aggregated_degrees(row: Row) -> tuple[int, int, int]:
    """Tensor-parallel degree, GPUs, and groups that experts are on.

    Some rows count the GPUs of expert parallelism twice: the same measurement appears as tp=8, moe_tp=1, moe_ep=8 and
    as tp=64, moe_tp=8, moe_ep=8, and as tp=4, dp=1, moe_ep=4 and tp=4, dp=4, moe_ep=16.
    """
    tp, dp = _degree(row, "tp_size"), _degree(row, "attention_dp_size")
    moe_tp, ep = _degree(row, "moe_tp_size"), _degree(row, "moe_ep_size")
    if moe_tp == ep > 1 and tp * dp == moe_tp * ep:
        return (moe_tp if dp == 1 else 1), moe_tp, ep
    if tp == dp > 1 and ep == tp * dp:
        return tp, tp, tp
    return tp, max(tp * dp, ep * moe_tp), ep


def _decode_choices(row: Row) -> list[tuple[int, int]]:
    """Tensor-parallel degree and number of decode workers.

    Where a row does not give the number of workers, its degree counts the GPUs of a worker. Rows that give it have four
    workers where decode is tensor parallel and one where it is data parallel; the faster of the two is taken.
    """
    tp = _degree(row, "decode_tp_size")
    if row["decode_num_workers"]:
        return [(tp, _degree(row, "decode_num_workers"))]
    mixture = _model(row).is_mixture
    return [(tp, 4), (1, 1)] if mixture and tp > 1 else [(tp, 4)]


def _worker(row: Row, kind: str, tp: int) -> ForwardPass:
    ep = _degree(row, f"{kind}_moe_ep_size")
    return _forward(row, tp, max(_degree(row, f"{kind}_tp_size"), ep), ep)


def _forward(row: Row, tp: int, gpus: int, ep: int) -> ForwardPass:
    model = _model(row)
    mixture = model.is_mixture
    deployment = Deployment(
        model=model,
        device=serving_device(row.choice("system", DEVICES)),
        precision=_precision(row),
        tp=tp,
        dp=max(1, gpus // tp) if mixture else 1,
        ep=ep if mixture and gpus % ep == 0 else 1,
    )
    needed = deployment.weights_per_gpu_bytes / _MOST_WEIGHTS
    if needed > deployment.device.memory_bytes:
        # It ran, so it fitted: on more GPUs than the columns name, or with fewer bits for some weights.
        deployment = replace(deployment, device=replace(deployment.device, memory_bytes=needed))
    framework = FRAMEWORKS[row.choice("backend", FRAMEWORKS)]
    load = _load(row)
    if (load.input_tokens, load.output_tokens) in LENGTHS:
        framework = recipe(framework, deployment, load, version=row.get("backend_version", ""))
    elif framework.name == "sglang":
        framework = replace(framework, passes_before_first=_SGLANG_PASSES if load.shortest < 1 else 0.0)
    return ForwardPass(deployment, framework)


def _model(row: Row) -> Transformer:
    try:
        return served_model(row["model_path"])
    except UsageError as problem:
        raise ConfigurationError(f"{row.where}, column model_path: {problem}") from problem


def _degree(row: Row, column: str) -> int:
    return max(1, row.whole(column, empty=1, least=0))
