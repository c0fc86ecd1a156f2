"""Names for laconic's work in torch's profiler and in Nsight.

    laconic encode bucket 3      the communication thread compresses the bucket and issues its first round
    laconic exchange bucket 3    the communication thread waits for a round of the bucket to arrive
    laconic decode bucket 3      the communication thread computes the result from what has arrived, or the next round
    laconic wait bucket 3        the training thread waits for the bucket

torch's profiler sees the threads of training only, unless it is asked for all of them (docs/seeing-a-run.md). Nsight
sees NVTX ranges on every thread; they are emitted for work on a GPU, and the NVTX library returns at once if no tool is
attached.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from torch.autograd import profiler

Phase = Literal["encode", "exchange", "decode", "wait"]
_NO_RANGE = nullcontext()
_HAS_NVTX = hasattr(torch._C, "_nvtx")
"""Whether this torch was built with NVTX; otherwise its functions raise."""


def profiler_range(phase: Phase, what: str, device: torch.device) -> AbstractContextManager[object]:
    """A named range for the body of a `with`; a no-op if no profiler is active."""
    # The flag is a global of torch: the profiler's own state belongs to the thread that started it.
    if profiler._is_profiler_enabled:
        return _seen_by_profiler(f"laconic {phase} {what}", device)
    if device.type == "cuda" and _HAS_NVTX:
        return torch.cuda.nvtx.range(f"laconic {phase} {what}")
    return _NO_RANGE


@contextmanager
def _seen_by_profiler(name: str, device: torch.device) -> Iterator[None]:
    # Within emit_nvtx, record_function already emits an NVTX range on the threads it covers.
    covered = torch._C._autograd._profiler_type() == torch._C._profiler.ActiveProfilerType.NVTX
    nvtx = torch.cuda.nvtx.range(name) if device.type == "cuda" and _HAS_NVTX and not covered else _NO_RANGE
    with nvtx, torch.profiler.record_function(name):
        yield
