"""A barrier for all programs of one launch. Imported only where Triton is installed."""

from __future__ import annotations

from functools import cache

import torch
import triton  # pyrefly: ignore - absent where there is no GPU
import triton.language as tl  # pyrefly: ignore

WARPS = 4
"""Warps of each program that waits at a barrier."""
_PER_PROCESSOR = 2
"""Programs that always fit on a multiprocessor, even with 255 registers for each of their 4 * 32 threads."""


@cache
def num_programs(device: torch.device) -> int:
    """How many programs of `WARPS` warps can wait for each other; launch them with launch_cooperative_grid=True."""
    if device.type != "cuda":  # Triton's interpreter runs one program after the other
        return 1
    return _PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def wait_for_all(arrived, target):
    """Continue when programs have arrived here `target` times in all; their earlier writes are then visible."""
    tl.debug_barrier()
    tl.atomic_add(arrived, 1, sem="acq_rel")
    while tl.atomic_add(arrived, 0, sem="acq_rel") < target:
        pass
    tl.debug_barrier()
