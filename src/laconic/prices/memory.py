"""Bytes a rank holds: weights, gradients, the optimizer's state, the strategy's state.

    replicated    (weights + gradients + 2 Adam moments) x bytes of the dtype
    sharded       the same over all ranks, and the two largest parts of the model unsharded

Activations, temporary buffers and the allocator's cache are not included: the result is a lower bound.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from laconic.strategy import Strategy
from laconic.workload import Workload

_COPIES = 4
"""Weights, gradients and two moments, all in the dtype of the parameters, as torch's AdamW keeps them."""
_BLOCK = re.compile(r"^(.*?\.\d+)(\.|$)")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of one rank, in bytes."""

    model: int
    """Weights, gradients and the optimizer's state."""
    strategy: int
    """The strategy's state between steps: residuals, anchors, momenta."""

    @property
    def total(self) -> int:
        """The sum of both."""
        return self.model + self.strategy


def memory_of(strategy: Strategy, workload: Workload, world_size: int) -> Memory:
    """The memory of a rank under a strategy."""
    nbytes = workload.gradient_bytes
    model = _COPIES * nbytes
    if strategy.architecture.holds_shards:
        model = _COPIES * nbytes // world_size + 2 * _largest_part(workload)
    return Memory(model=model, strategy=strategy.state_bytes(workload.tensors))


def _largest_part(workload: Workload) -> int:
    """Parameters of the parts that are unsharded one at a time: blocks, by the numbers in names, and other layers."""
    parts: dict[str, int] = defaultdict(int)
    for layer in workload.layers:
        match = _BLOCK.match(layer.name)
        parts[match[1] if match else layer.name] += sum(tensor.numel for tensor in layer.tensors)
    return max(parts.values()) * workload.dtype.itemsize
