"""The cost of encoding and decoding on a known device, from measured kernels and the wrappers around them.

    t(M) = start-up + M x seconds per byte      of M bytes of gradients, before compression

Kernels were measured on an H200 and on one core of a CPU (docs/results/kernels.md). They read and write memory and do
little else - most reach 60 to 90% of a copy's speed - so another GPU is assumed to be slower by the ratio of memory
bandwidths. The cost of a wrapper is counted as copies of the gradient. Methods in neither table were not measured and
have no known cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from laconic.compression import Compressor
from laconic.workload import CodecCost
from laconic.workload.devices import DEVICES, KnownDevice

_H200_BYTES, _CPU_BYTES = 25_000_000 * 4, 5_000_000 * 4
"""Bytes of the gradients that were encoded."""
_H200_COPY_MS, _CPU_COPY_MS = 0.0524, 1.3415
_LAUNCH_MS = 0.0356
"""The host's overhead per kernel on a GPU: exact top-k takes 0.0840 ms alone, 0.1196 ms with the host."""

H200_KERNELS: dict[str, tuple[float, float]] = {
    "fp16": (0.0378, 0.0732),
    "bf16": (0.0378, 0.0732),
    "fp8": (0.0353, 0.0372),
    "int8": (0.0359, 0.0370),
    "int4": (0.0341, 0.0341),
    "qsgd": (0.0593, 0.0350),
    "nuqsgd": (0.0618, 0.0332),
    "intsgd": (0.0419, 0.0425),
    "terngrad": (0.0468, 0.0314),
    "natural": (0.0531, 0.0362),
    "signsgd": (0.0321, 0.0300),
    "ef_signsgd": (0.0301, 0.0306),
    "onebit": (0.0399, 0.0309),
}
"""Milliseconds for 25 million values, encode and decode, with default settings; bf16 as fp16, both are casts; intsgd
with four ranks."""
CPU_KERNELS: dict[str, tuple[float, float]] = {
    "fp16": (37.5356, 13.7830),
    "bf16": (6.1645, 1.8373),
    "fp8": (5.6729, 3.7557),
    "int8": (3.6474, 3.4238),
    "int4": (4.5557, 4.2661),
    "qsgd": (18.0119, 5.6997),
    "nuqsgd": (15.2000, 5.5732),
    "intsgd": (21.0874, 16.1667),
    "terngrad": (13.4974, 3.3115),
    "natural": (11.2470, 3.5566),
    "signsgd": (2.9055, 2.8056),
    "ef_signsgd": (4.8098, 4.1012),
    "onebit": (9.9779, 4.0721),
}
"""Milliseconds for 5 million values; bf16 with stochastic rounding."""
H200_SELECTIONS = {
    "topk": 0.0840,
    "gtopk": 0.0840,
    "dgc": 0.0840,
    "threshold": 0.0840,
    "sidco": 0.0726,
    "adacomp": 0.1632,
    "sketch": 0.7230 + 0.4770 + 0.0840,
}
CPU_SELECTIONS = {"topk": 6.5146, "gtopk": 6.5146, "dgc": 6.5146, "threshold": 6.5146, "sidco": 7.4566}
"""Milliseconds to find the largest 1% of the same number of values, or what a method sends instead; sketch: cells,
estimates and the largest of them. Decoding writes zeros and a few values, half a copy."""
_POWERSGD_MS, _POWERSGD_HOST_MS, _POWERSGD_RANK = (0.1408, 0.5043 - 0.1408, 4)
_POWERSGD_CPU_MS = 12.6455
_DEMO_MS, _DEMO_BYTES = (222.8 - 112.5) / 4, 497_759_232
"""Time of encoding and decoding the momentum of GPT-2: four ranks on one H200 took 222.8 ms for a step of demo-int4
and 112.5 ms for one without communication (docs/results/time_to_loss.md)."""
_WRAPPER_COPIES = {
    "error_feedback": 3.0,  # adds the residual; subtracts what was sent; each reads two and writes one
    "ef21": 3.0,
    "momentum_correction": 3.0,
    "warmup": 0.0,
    "chain": 0.1,  # works on the few values that were kept
}
"""A wrapper's own memory traffic in copies of the gradient; a copy is one read and one write."""


@dataclass(frozen=True)
class _Table:
    """The measurements on one device."""

    device: str
    kernels: dict[str, tuple[float, float]]
    selections: dict[str, float]
    nbytes: int
    copy_ms: float
    launch_ms: float


_H200 = _Table("an H200", H200_KERNELS, H200_SELECTIONS, _H200_BYTES, _H200_COPY_MS, _LAUNCH_MS)
_CPU = _Table("one core of a CPU", CPU_KERNELS, CPU_SELECTIONS, _CPU_BYTES, _CPU_COPY_MS, 0.0)


def codec_cost(compressor: Compressor, device: KnownDevice | None) -> CodecCost | None:
    """The cost of a compressor on a device, None if it was not measured; device: None means a CPU."""
    table = _CPU if device is None else _H200
    *wrappers, base = compressor.layers()
    milliseconds = _base_ms(base, table)
    if milliseconds is None or any(wrapper.name not in _WRAPPER_COPIES for wrapper in wrappers):
        return None
    startup_ms, encode_ms, decode_ms = milliseconds
    encode_ms += sum(_WRAPPER_COPIES[wrapper.name] for wrapper in wrappers) * table.copy_ms
    slower = 1.0
    source = f"Kernels as measured on {table.device} (docs/results/kernels.md)"
    if device is not None and device.name != "h200":
        slower = DEVICES["h200"].peaks.memory_bytes_per_s / device.peaks.memory_bytes_per_s
        source += f", {slower:.1f} times as long on a {device.name}, whose memory is so much slower"
    return CodecCost(
        compressor=str(compressor),
        encode_startup_s=startup_ms * 1e-3,
        encode_byte_s=slower * encode_ms * 1e-3 / table.nbytes,
        decode_startup_s=startup_ms * 1e-3,
        decode_byte_s=slower * decode_ms * 1e-3 / table.nbytes,
        source=f"{source}; wrappers counted as copies.",
    )


def known_codecs(compressors: Iterable[Compressor], device: KnownDevice | None) -> tuple[CodecCost, ...]:
    """The known costs of compressors, each once; lossless ones cost nothing."""
    found = {
        str(compressor): cost
        for compressor in compressors
        if not compressor.traits.lossless and (cost := codec_cost(compressor, device)) is not None
    }
    return tuple(found.values())


def _base_ms(base: Compressor, table: _Table) -> tuple[float, float, float] | None:
    """Start-up, encoding and decoding time of the method inside all wrappers, for the bytes of the table."""
    if base.name in table.kernels and not _changes_work(base):
        return table.launch_ms, *table.kernels[base.name]
    if base.name in table.selections:
        return table.launch_ms, table.selections[base.name], table.copy_ms / 2
    if base.name == "powersgd":
        rank = base.settings()["rank"]
        assert isinstance(rank, int), "declared as a count"
        times = rank / _POWERSGD_RANK
        if table is _CPU:
            return 0.0, times * _POWERSGD_CPU_MS, 0.0
        return _POWERSGD_HOST_MS, times * _POWERSGD_MS, 0.0
    if base.name == "dct_topk" and table is _H200:
        return _LAUNCH_MS, _DEMO_MS * table.nbytes / _DEMO_BYTES, 0.0
    return None


def _changes_work(base: Compressor) -> bool:
    """Whether its settings need other kernels than those that were measured."""
    return bool(set(base.changed_settings()) - {"block"})
