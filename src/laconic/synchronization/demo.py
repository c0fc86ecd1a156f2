"""Decoupled momentum in every step: DeMo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.core.exchange import Exchange
from laconic.core.optimizer_facts import OptimizerFacts
from laconic.core.stateful import BucketState, Resize
from laconic.core.tensor import TensorSpec
from laconic.settings import number
from laconic.synchronization.contract import Average, Quantity, Synchronization, exchange_momentum

_MOMENTUM = "demo.momentum"


@dataclass(frozen=True, kw_only=True)
class Demo(Synchronization):
    """Exchange the fast-moving components of each replica's momentum and step on the sign of their mean.

        m_i <- beta m_i + g_i,   q_i = C(m_i),   m_i <- m_i - q_i,   g <- sign(mean_i(q_i))

    C is the compressor of the strategy; left off, dct_topk as published. The optimizer must be SGD without momentum: it
    gets a direction of length one per parameter, so its learning rate is that of sign methods.

    Reference: Peng et al. 2024, arXiv:2411.19870.
    """

    name: ClassVar[str] = "demo"
    elastic: ClassVar[bool] = True
    acts_alone: ClassVar[bool] = True
    keeps_scale: ClassVar[bool] = False
    quantity: ClassVar[Quantity] = "gradient"
    replicas_identical: ClassVar[bool] = True
    needs_everyone: ClassVar[bool] = True
    remembers_unsent: ClassVar[bool] = True
    partners: ClassVar[Mapping[str, str]] = {"compression": "dct_topk"}
    # Gradients are scaled by 1/n, so unsent values of several workers add up.
    fields: ClassVar[Mapping[str, Resize]] = {_MOMENTUM: "sum"}
    scale_equivariant: ClassVar[bool] = False
    scaled_fields: ClassVar[frozenset[str]] = frozenset({_MOMENTUM})

    beta: float = number(0.999, at_least=0.0, at_most=1.0)
    """The share of the unsent momentum that is kept until the next step."""

    def check(self, tensors: Sequence[TensorSpec], optimizer: OptimizerFacts) -> None:
        """Raise if the optimizer has momentum as well."""
        optimizer.check_no_momentum("synchronization.demo", 'use "bsp", which keeps none')

    def around(self, flat: torch.Tensor, state: BucketState, average: Average) -> Exchange:
        """Exchange the part of the momentum that the compressor selects; the sign of the mean replaces the gradient."""
        yield from exchange_momentum(state.flat[_MOMENTUM], self.beta, flat, average)
        flat.sign_()
