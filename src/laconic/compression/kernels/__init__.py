"""The inner loops of compressors: a plain torch reference for each, and faster ones that give the same bits.

`encode` and `decode` run quantizers: `reference` has them for every device, `_FUSED` says what is faster where. Such a
module has tables of the same form and need not have every kernel; what it lacks the reference does.

    ENCODERS[name](flat, chunks, packed, moment_seed, **settings)     fills `packed` but for its padding
    DECODERS[name](packed, chunks, out, **settings)                   fills `out`
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Literal

import torch

from laconic.compression.kernels import reference
from laconic.compression.wire.chunks import Chunks
from laconic.errors import one_line

Backend = Literal["fused", "reference"]

_FUSED = {
    "cpu": ("numba", "laconic.compression.kernels.numba_cpu"),
    "cuda": ("triton", "laconic.compression.kernels.triton_gpu"),
}
"""device type -> what must be installed, and the module that needs it; imported when first used"""


def encode(
    name: str,
    flat: torch.Tensor,
    chunks: Chunks,
    moment_seed: int,
    *,
    backend: Backend = "fused",
    **settings: float,
) -> torch.Tensor:
    """The packed bytes of `flat`; backend = "fused": where there is a fused kernel."""
    assert flat.numel() == chunks.bucket.numel, f"{flat.numel()} values for a bucket of {chunks.bucket.numel}"
    packed = torch.empty(chunks.packed_bytes, dtype=torch.uint8, device=flat.device)
    used = chunks.scale_bytes + int(chunks.code_starts[-1])
    if used < len(packed):
        packed[used:] = 0
    if len(packed):
        _lookup("ENCODERS", name, flat.device.type, backend)(flat, chunks, packed, moment_seed, **settings)
    return packed


def decode(
    name: str,
    packed: torch.Tensor,
    chunks: Chunks,
    out: torch.Tensor,
    *,
    backend: Backend = "fused",
    **settings: float,
) -> None:
    """Write what `packed` stands for into `out`."""
    assert len(packed) == chunks.packed_bytes, f"{len(packed)} bytes where {chunks.packed_bytes} are due"
    if len(packed):
        _lookup("DECODERS", name, out.device.type, backend)(packed, chunks, out, **settings)


def has_fused(device_type: str) -> bool:
    """Whether quantizers are fused on this kind of device, here and now."""
    return bool(_tables(device_type))


@cache
def _lookup(table: str, name: str, device_type: str, backend: Backend) -> Callable[..., None]:
    fused = _tables(device_type).get(table, {}) if backend == "fused" else {}
    return fused.get(name) or getattr(reference, table)[name]


@cache
def _tables(device_type: str) -> Mapping[str, Mapping[str, Callable[..., None]]]:
    """The tables of the fused module for this kind of device, if it can be used."""
    package, module = _FUSED.get(device_type, ("", ""))
    if not package or find_spec(package) is None:
        return {}
    try:
        found = import_module(module)
    except (ImportError, RuntimeError) as exc:  # another numpy than it was made for; nowhere to keep compiled code
        warnings.warn(
            f"{package} is installed but cannot be used ({one_line(exc)}); compression runs in plain torch, which is "
            f"slower. Repair or uninstall {package}.",
            stacklevel=2,
        )
        return {}
    return {"ENCODERS": found.ENCODERS, "DECODERS": found.DECODERS}
