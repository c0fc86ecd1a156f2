"""The work items of a layer: products, memory-bound kernels, fused attention."""

from __future__ import annotations

from typing import NamedTuple


class Product(NamedTuple):
    """`batch` products of m x k by k x n."""

    m: float
    n: float
    k: float
    batch: float = 1
    has_weights: bool = True
    """Whether one factor is a parameter."""
    narrow: bool = True
    """Whether it may run with 8-bit numbers; the output layer does not."""

    @property
    def flops(self) -> float:
        """Operations; a multiplication with its addition counts as two."""
        return 2.0 * self.m * self.n * self.k * self.batch

    def backward(self) -> tuple[Product, Product]:
        """The products for both gradients; the second is that of the weights."""
        return (
            self._replace(n=self.k, k=self.n),
            self._replace(m=self.k, k=self.m),
        )


class Kernel(NamedTuple):
    """Bytes that element-wise kernels read and write."""

    forward_bytes: float
    backward_bytes: float


class FusedAttention(NamedTuple):
    """Scores, softmax and the weighted sum of values in one kernel."""

    flops: float
    """Operations of the forward pass; the backward pass, which recomputes scores, has 2.5 times as many."""


Item = Product | Kernel | FusedAttention
