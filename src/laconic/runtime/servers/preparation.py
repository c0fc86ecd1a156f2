"""Code that a server loads and compiles before it reports that it listens, so the first request need not wait."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec

import torch

from laconic.compression import Compressor
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.strategy import Strategy

_NUMEL = 8192
"""Large enough that kernels do not take their fast path for small tensors."""


def load_libraries() -> None:
    """Import the modules of an optimizer's first step and of the first compiled kernel, for any job."""
    import_module("torch._dynamo")
    if find_spec("numba") is not None:
        with contextlib.suppress(ImportError):  # built for another numpy: the kernels report it when they are needed
            import_module("numba")


def prepare(strategy: Strategy, dtypes: Iterable[torch.dtype], *, holds: bool) -> None:
    """Run the work of this strategy's requests once, with small tensors of each dtype."""
    if holds:
        import_module("torch._dynamo")
    compression = strategy.compression
    if not compression.traits.decodes_alone:
        return  # such servers only add up
    for dtype in dtypes:
        bucket = Bucket((TensorSpec("weight", (64, _NUMEL // 64), dtype), TensorSpec("bias", (_NUMEL,), dtype)))
        for moment in (Moment(), Moment.steady(1)):
            for one in (compression, compression.back(), compression.back().forgetful()):
                _round_trip(one, bucket, moment)


def _round_trip(compression: Compressor, bucket: Bucket, moment: Moment) -> None:
    state = compression.init(bucket)
    state.moment = moment
    values = torch.linspace(-1.0, 1.0, bucket.numel, dtype=bucket.dtype)
    compression.decode(compression.encode(values, state), torch.empty_like(values), state)
