"""Orthonormal steps of low rank along momenta that stay local: Dion."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.core.exchange import Exchange
from laconic.core.optimizer_facts import OptimizerFacts
from laconic.core.stateful import BucketState, Factors, Resize
from laconic.core.tensor import TensorSpec
from laconic.errors import AttachError
from laconic.settings import choice, number
from laconic.synchronization.contract import Average, Quantity, Synchronization, exchange_momentum

_MOMENTUM = "dion.momentum"


@dataclass(frozen=True, kw_only=True)
class Dion(Synchronization):
    """Exchange two thin factors of each replica's momentum and step along them with columns of length one.

        M_i <- M_i + G_i,   P = orth(sum_i M_i V),   R_i = M_i^T P,   M_i <- M_i - (1 - mu) P R_i^T
        R = mean_i(R_i),    V = R with columns of length one,         G <- scale P V^T

    P and R are the factors of the strategy's compressor: `powersgd`, as published, or `acpsgd`, which exchanges one of
    them per step. V need not be kept: its columns span the same space as those of R, which `powersgd` keeps. Columns of
    R that are only rounding error make no step. The part of M_i that the factors leave out stays in the momentum. A
    parameter that the compressor sends uncompressed (vectors, small matrices, those that `per_layer` skips) has a plain
    momentum, and its step is the sign of the mean:

        m_i <- mu m_i + g_i,   g <- sign(mean_i(m_i))

    The optimizer must be SGD without momentum. In the code of the authors M_i loses P R^T, here P R_i^T: the mean of
    all M_i, and with it every step, is the same, and the momenta of workers do not drift apart.

    Reference: Ahn et al. 2025, arXiv:2504.05295.
    """

    name: ClassVar[str] = "dion"
    elastic: ClassVar[bool] = True
    acts_alone: ClassVar[bool] = True
    keeps_scale: ClassVar[bool] = False
    quantity: ClassVar[Quantity] = "gradient"
    replicas_identical: ClassVar[bool] = True
    needs_everyone: ClassVar[bool] = True
    remembers_unsent: ClassVar[bool] = True
    needs_factors: ClassVar[bool] = True
    partners: ClassVar[Mapping[str, str]] = {"compression": "powersgd"}
    # Gradients are scaled by 1/n, so momenta of several workers add up.
    fields: ClassVar[Mapping[str, Resize]] = {_MOMENTUM: "sum"}
    scale_equivariant: ClassVar[bool] = False
    scaled_fields: ClassVar[frozenset[str]] = frozenset({_MOMENTUM})

    mu: float = number(0.95, at_least=0.0, at_most=0.999)
    """The share of the exchanged momentum that is kept until the next step."""
    scale: str = choice("rms_norm", "spectral_norm")
    """The length of a matrix's step. rms_norm: 0.2 sqrt(max(rows, columns)), for the learning rate of Adam.
    spectral_norm, as published: sqrt(rows / columns), for a learning rate of about 0.01."""

    def check(self, tensors: Sequence[TensorSpec], optimizer: OptimizerFacts) -> None:
        """Raise if the optimizer changes directions once more, or if a parameter is sharded."""
        optimizer.check_applies_directions("synchronization.dion", 'use "bsp", which averages gradients')
        shard = next((tensor for tensor in tensors if tensor.whole_bytes), None)
        if shard is not None:
            raise AttachError(
                "synchronization.dion makes an orthonormal step of each whole matrix, but this rank has only a shard "
                f'of "{shard.name}". Use "demo", or train without sharding.'
            )

    @property
    def usual_rate(self) -> str:
        return "as for Adam" if self.scale == "rms_norm" else "of about 0.01"

    def around(self, flat: torch.Tensor, state: BucketState, average: Average) -> Exchange:
        """Exchange the factors of the momentum; a direction made of them replaces the gradient."""
        state.factors = factors = {}
        yield from exchange_momentum(state.flat[_MOMENTUM], 1.0, flat, average, removed=1.0 - self.mu)
        state.factors = None
        for tensor, place in state.bucket.segments():
            if tensor.name in factors:
                left, right = unit_columns(factors[tensor.name])
                step = (left @ right).mul_(self._length(tensor.shape[0], tensor.numel // tensor.shape[0]))
                flat[place].copy_(step.view(-1))
            else:
                flat[place].sign_()

    def _length(self, rows: int, columns: int) -> float:
        if self.scale == "rms_norm":
            # Of full rank, such a step has the root mean square 0.2 per element, which Adam's steps usually have.
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(rows / columns)


def unit_columns(factors: Factors) -> Factors:
    """The factors with each column on the left and each row on the right divided by its length.

    A pair that is only rounding error, compared with the longest, becomes zero; a length that is not finite makes all
    NaN.
    """
    left, right = factors
    lengths = torch.linalg.vector_norm(left, dim=0) * torch.linalg.vector_norm(right, dim=1)
    longest = lengths.max()
    rounding = torch.finfo(lengths.dtype).eps * math.sqrt(len(left) + right.shape[1])
    weights = torch.where(lengths > rounding * longest, 1.0 / lengths, 0.0)
    return Factors(left * torch.where(longest.isfinite(), weights, torch.nan), right)
