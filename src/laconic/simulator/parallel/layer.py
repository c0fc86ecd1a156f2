"""The work of one layer on one rank: products, memory-bound kernels, fused attention, and exchanges.

Forward and backward pass are listed separately. A product of the forward pass becomes two in the
backward pass: one for the gradient of its input, one for that of its weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from laconic.simulator.parallel.accelerator import Accelerator
from laconic.simulator.parallel.plan import Plan
from laconic.simulator.parallel.software import Software
from laconic.simulator.parallel.work import FusedAttention, Item, Kernel, Product
from laconic.workload.transformer import Projection, Transformer

_ELEMENT_BYTES = 2


@dataclass(frozen=True)
class Slice:
    """One rank's part of a layer and of a micro-batch."""

    model: Transformer
    plan: Plan
    sequence: int
    software: Software

    @property
    def tokens(self) -> float:
        """The tokens of a micro-batch on one context-parallel rank."""
        return self.plan.micro_batch * self.sequence / self.plan.cp

    def product(self, projection: Projection) -> Product:
        """The matrix product of a projection."""
        tp = self.plan.tp
        outputs = projection.outputs / tp if projection.split == "column" else projection.outputs
        inputs = projection.inputs / tp if projection.split == "row" else projection.inputs
        if not projection.routed:
            return Product(self.tokens, outputs, inputs)
        # Balanced: each expert has an equal share of the tokens of all ranks that share the experts. Ranks of the
        # tensor dimension hold whole experts and share out the tokens between them.
        experts = projection.experts / self.plan.ep
        tokens = self.tokens * projection.active * self.plan.ep / projection.experts / tp
        return Product(tokens, projection.outputs, projection.inputs, experts)

    def items(self, *, mixture: bool) -> Iterator[Item]:
        """All computation of a layer."""
        yield from self.attention_items()
        model, tp, tokens = self.model, self.plan.tp, self.tokens
        for projection in model.projections(mixture=mixture):
            yield self.product(projection)
        yield self._residual_path()
        for projection in model.projections(mixture=mixture):
            if projection.name.endswith(".down"):
                inner = tokens * projection.inputs * projection.active / tp
                yield self.software.activation(inner, gated=model.gated)
        if mixture:
            # Tokens are permuted before and after the experts, with their weights at the end.
            moved = tokens * model.num_experts_per_tok * model.hidden_size * _ELEMENT_BYTES
            yield Kernel(4 * moved / tp, 4 * moved / tp)

    def _residual_path(self) -> Kernel:
        """Two normalizations, two residual additions with dropout, where there is any."""
        shared = self.plan.tp if self.plan.sequence_parallel else 1
        return self.software.residual(self.tokens * self.model.hidden_size / shared)

    def attention_items(self) -> Iterator[Item]:
        """Scores, softmax and the weighted sum of values, which selective recomputation repeats."""
        model, plan = self.model, self.plan
        heads = model.num_attention_heads / plan.tp
        width = (model.head_width + model.value_width) / 2
        if self.software.fused_attention:
            context = self.sequence / 2 if self.software.skips_masked else self.sequence
            if self.software.attention_window:
                window = min(self.software.attention_window, self.sequence)
                # The first tokens of a sequence have fewer predecessors than the window holds.
                context = window * (1 - window / self.sequence / 2)
            uneven = 1.0
            if plan.cp > 1 and self.software.skips_masked and not self.software.balances_context:
                # The rank with the end of the sequence attends to all of it, and the others wait for that rank.
                uneven = (2 * plan.cp - 1) / plan.cp
            yield FusedAttention(4.0 * self.tokens * context * heads * width * uneven)
            return
        batch = plan.micro_batch * heads
        rows = self.sequence / plan.cp
        yield Product(rows, self.sequence, model.head_width, batch, has_weights=False)
        yield Product(rows, model.value_width, self.sequence, batch, has_weights=False)
        yield self.software.scores(batch * rows * self.sequence)


def forward_s(items: Iterable[Item], device: Accelerator, software: Software) -> float:
    """Seconds of the forward pass."""
    total = 0.0
    for item in items:
        if isinstance(item, Product):
            rate = software.weight_product_rate if item.has_weights and item.narrow else 1.0
            total += device.matmul_s(item, rate=rate)
        elif isinstance(item, Kernel):
            total += device.memory_s(item.forward_bytes)
        else:
            total += device.attention_s(item.flops)
    return total


class BackwardTime(NamedTuple):
    """Seconds of the backward pass: for the gradients of inputs, which the previous layer waits for, and of weights."""

    inputs_s: float
    weights_s: float


def backward_s(items: Iterable[Item], device: Accelerator, software: Software) -> BackwardTime:
    """Seconds of the backward pass, nothing recomputed."""
    inputs_s = weights_s = 0.0
    for item in items:
        if isinstance(item, Product):
            rate = software.weight_product_rate if item.has_weights and item.narrow else 1.0
            first, second = (device.matmul_s(product, rate=rate) for product in item.backward())
            inputs_s += first
            if item.has_weights:
                weights_s += second
            else:
                inputs_s += second
        elif isinstance(item, Kernel):
            inputs_s += device.memory_s(item.backward_bytes)
        else:
            inputs_s += 2.5 * device.attention_s(item.flops)
    return BackwardTime(inputs_s, weights_s)
