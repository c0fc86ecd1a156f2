"""The input of `laconic simulate --serve`: one line of key=value words; several values make a sweep.

model=llama3-70b device=h100_sxm tp=1,2,4,8 concurrency=32 input=1024 output=512 precision=fp8 framework=vllm

model            a name, or a config.json with Hugging Face's keys
device           the kind of GPU
precision        bf16, fp8, fp4 or int4
framework        vllm, sglang or trtllm
tp, dp, ep       GPUs that divide attention; groups that share the experts; groups the experts are on
concurrency      requests in flight
input, output    tokens of a prompt and of an answer
link             measured systems whose collective times are used, e.g. h100_sxm,l40s; default: the device's
prefill_workers  the number of separate workers for prefill (disaggregated); then also
prefill_tp, decode_workers, transfer (the rate at which a GPU sends its part of the cache, e.g. 400gbit)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import cast

from laconic.cluster import Link, parse_bandwidth
from laconic.cluster.collective_costs import CollectiveCosts, system_names
from laconic.errors import ConfigurationError, UsageError, did_you_mean, one_line
from laconic.simulator.serving.deployment import WEIGHT_BYTES, Deployment, Precision
from laconic.simulator.serving.devices import serving_device
from laconic.simulator.serving.forward import ForwardPass
from laconic.simulator.serving.frameworks import FRAMEWORKS
from laconic.simulator.serving.latency import Served, aggregated, disaggregated
from laconic.simulator.serving.load import Load
from laconic.simulator.serving.models import served_model

_DEFAULTS = {
    "model": "llama3-70b",
    "device": "h100_sxm",
    "precision": "fp8",
    "framework": "vllm",
    "tp": "1,2,4,8",
    "dp": "1",
    "ep": "1",
    "concurrency": "32",
    "input": "1024",
    "output": "512",
    "link": "",
    "prefill_workers": "",
    "prefill_tp": "",
    "decode_workers": "",
    "transfer": "",
}
_DISAGGREGATED = ("prefill_tp", "decode_workers", "transfer")
_MOST_POINTS = 1000


@dataclass(frozen=True, kw_only=True)
class ServePoint:
    """One deployment under one load, and its latencies; `refused` says why it cannot serve."""

    tp: int
    dp: int
    ep: int
    concurrency: int
    link: str
    gpus: int
    output_tokens: int
    served: Served | None
    refused: str | None = None

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Output tokens per second that one GPU contributes; 0 if it is refused."""
        if self.served is None:
            return 0.0
        request_s = self.served.first_token_s + self.output_tokens * self.served.token_s
        return self.concurrency * self.output_tokens / request_s / self.gpus


@dataclass(frozen=True, kw_only=True)
class ServeSweep:
    """Every point, in the order in which values were given."""

    model: str
    device: str
    precision: str
    framework: str
    load: Load
    points: tuple[ServePoint, ...]
    warnings: tuple[str, ...]


def serve(text: str) -> ServeSweep:
    """Read the line and simulate every point."""
    words = _words(text)
    model = served_model(words["model"])
    device = serving_device(words["device"])
    precision = cast("Precision", _choice(words, "precision", WEIGHT_BYTES))
    framework = FRAMEWORKS[_choice(words, "framework", FRAMEWORKS)]
    links = [_one(link, "link", system_names()) for link in (words["link"] or device.system).split(",")]
    warnings: list[str] = []
    load = Load(input_tokens=_count(words, "input"), output_tokens=_count(words, "output"))
    degrees = list(product(*(_counts(words, key) for key in ("tp", "dp", "ep", "concurrency"))))
    if len(links) * len(degrees) > _MOST_POINTS:
        raise UsageError(
            f"--serve: {len(links) * len(degrees)} points are more than {_MOST_POINTS}. Give fewer values."
        )

    def worker(tp: int, dp: int, ep: int, costs: CollectiveCosts) -> ForwardPass:
        made = Deployment(model=model, device=device, precision=precision, tp=tp, dp=dp, ep=ep)
        made.most_cached_tokens(framework.kv_bytes)  # raises where the weights do not fit
        return ForwardPass(made, framework, costs, warnings)

    points: list[ServePoint] = []
    for link in links:
        make = partial(worker, costs=CollectiveCosts(link))
        for tp, dp, ep, concurrency in degrees:
            gpus, served, refused = tp * dp, None, None
            try:
                _check_heads(model.num_attention_heads, tp)
                gpus, served = _served(words, make, replace(load, concurrency=concurrency), (tp, dp, ep))
            except ConfigurationError as problem:
                refused = str(problem)
            points.append(
                ServePoint(
                    tp=tp,
                    dp=dp,
                    ep=ep,
                    concurrency=concurrency,
                    link=link,
                    gpus=gpus,
                    output_tokens=load.output_tokens,
                    served=served,
                    refused=refused,
                )
            )
    if all(point.served is None for point in points):
        raise ConfigurationError(points[0].refused or "serving: nothing to simulate.")
    return ServeSweep(
        model=model.name,
        device=device.name,
        precision=precision,
        framework=framework.name,
        load=load,
        points=tuple(points),
        warnings=tuple(warnings),
    )


def _served(
    words: dict[str, str], worker: Callable[[int, int, int], ForwardPass], load: Load, degrees: tuple[int, int, int]
) -> tuple[int, Served]:
    """The number of GPUs, and the latencies of the deployment."""
    tp, dp, ep = degrees
    decode = worker(tp, dp, ep)
    if not words["prefill_workers"]:
        return tp * dp, aggregated(decode, load)
    prefill_workers = _count(words, "prefill_workers")
    decode_workers = _count(words, "decode_workers") if words["decode_workers"] else 1
    prefill = worker(_count(words, "prefill_tp") if words["prefill_tp"] else tp, dp, ep)
    # A link refuses what no link can have.
    link = Link(bandwidth_bps=parse_bandwidth(words["transfer"] or "400gbit", "--serve: transfer"))
    found = disaggregated(
        prefill,
        decode,
        load,
        prefill_workers=prefill_workers,
        decode_workers=decode_workers,
        transfer_bytes_per_s=link.bytes_per_s,
    )
    return prefill_workers * prefill.deployment.gpus + decode_workers * decode.deployment.gpus, found


def _words(text: str) -> dict[str, str]:
    words = dict(_DEFAULTS)
    given: set[str] = set()
    for word in text.split():
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise UsageError(f'--serve: write key=value, e.g. tp=8, got "{one_line(word, 40)}".')
        if key not in words:
            raise UsageError(f'--serve: there is no key "{one_line(key, 40)}". {did_you_mean(key, words)}')
        if key in given:
            raise UsageError(f"--serve: {key} is given twice. Several values are written {key}=1,2.")
        given.add(key)
        words[key] = value
    alone = [key for key in _DISAGGREGATED if words[key]]
    if alone and not words["prefill_workers"]:
        raise UsageError(f"--serve: {alone[0]} has no effect without prefill_workers.")
    return words


def _counts(words: dict[str, str], key: str) -> list[int]:
    found = []
    for text in words[key].split(","):
        if not text.isdecimal() or not 1 <= int(text) <= 1 << 20:
            raise UsageError(
                f'--serve: {key} must be whole numbers from 1 to {1 << 20}, e.g. {key}=1,2, got "{one_line(text, 40)}".'
            )
        found.append(int(text))
    return list(dict.fromkeys(found))


def _count(words: dict[str, str], key: str) -> int:
    found = _counts(words, key)
    if len(found) > 1:
        raise UsageError(f"--serve: {key} takes one value, got {words[key]}.")
    return found[0]


def _choice(words: dict[str, str], key: str, allowed: Iterable[str]) -> str:
    return _one(words[key], key, list(allowed))


def _one(text: str, key: str, allowed: list[str]) -> str:
    if text not in allowed:
        raise UsageError(f'--serve: {key} cannot be "{one_line(text, 40)}". {did_you_mean(text, allowed)}')
    return text


def _check_heads(heads: int, tp: int) -> None:
    if heads % tp:
        near = min((n for n in range(1, heads + 1) if heads % n == 0), key=lambda n: abs(n - tp))
        raise ConfigurationError(f"serving: tp={tp} does not divide {heads} heads; the nearest is tp={near}.")
