"""The time of one forward pass, over prompts or over one new token of each sequence.

products   max(operations / (peak * share), weights read / (memory bandwidth * share)), where every product has
           some more rows than tokens: tiles are filled up
experts    those that at least one token of the pass goes to take part: E (1 - (1 - k / E)^rows); of `ep` groups of
           them the busiest sets the pace, 1 + sqrt(2 ln(ep) / tokens of a group) times the mean
attention  operations of new tokens with all before them, or the cache read once
moved      in prefill, kernels between products (normalizations, quantization, sorting for experts) read and write
           every token; tensor parallelism does not divide this work
network    two all-reduces per layer with tensor parallelism; dispatch and combine of tokens where groups of GPUs
           share the experts
layers     the time of kernels that do neither
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from laconic.cluster.collective_costs import CollectiveCosts, ExpertAllToAll, Routing
from laconic.simulator.serving.deployment import Deployment
from laconic.simulator.serving.frameworks import Framework
from laconic.workload.transformer import Projection

_IDLE_ROWS, _IDLE_EXPERT_ROWS = 64, 16
"""Rows of padding that fill up tiles, for a dense matrix and for that of an expert."""
_ACTIVATION_BYTES = 2


@dataclass(frozen=True)
class PassTime:
    """Seconds of one pass on the GPU, by what they are spent on."""

    products_s: float
    attention_s: float
    network_s: float
    layers_s: float

    @property
    def seconds(self) -> float:
        """The sum of all parts: layers follow each other, and nothing inside a layer overlaps."""
        return self.products_s + self.attention_s + self.network_s + self.layers_s


class ForwardPass:
    """Computes the time of passes of one deployment.

    costs: where collective operations take their times from; default: the device's measured system.
    warnings: a list to which a warning is added for every cost that was not measured.
    """

    def __init__(
        self,
        deployment: Deployment,
        framework: Framework,
        costs: CollectiveCosts | None = None,
        warnings: list[str] | None = None,
    ) -> None:
        self.deployment = deployment
        self.framework = framework
        self.costs = costs or CollectiveCosts(deployment.device.system)
        self.warnings = [] if warnings is None else warnings

    def prefill(self, tokens: float, context: float) -> PassTime:
        """A pass over `tokens` new tokens of one group, each attending to `context` / 2 on average."""
        model, device = self.deployment.model, self.deployment.device
        heads = model.num_attention_heads / self.deployment.tp
        operations = 2 * tokens * context / 2 * heads * (model.head_width + model.value_width)
        attention_s = model.num_hidden_layers * operations / (device.flops_per_s["bf16"] * device.attention_share)
        passed = self._pass(tokens, attention_s, device.expert_prompt_ratio)
        return replace(passed, layers_s=passed.layers_s + self._moving_s(tokens))

    def _moving_s(self, tokens: float) -> float:
        """Kernels between the products of a prefill pass."""
        deployment, model, device = self.deployment, self.deployment.model, self.deployment.device
        copies = model.num_experts_per_tok * deployment.dp / deployment.ep
        moves = model.num_hidden_layers * device.moves + model.num_mixture_layers * copies * device.expert_moves
        per_s = device.memory_bytes_per_s * device.memory_share
        return moves * tokens * model.hidden_size * _ACTIVATION_BYTES / per_s

    def decode(self, sequences: float, context: float) -> PassTime:
        """One new token for each of `sequences` of one group, with `context` tokens in the cache."""
        device = self.deployment.device
        read = sequences * context * self.deployment.cache_per_token_bytes(self.framework.kv_bytes)
        return self._pass(sequences, read / (device.memory_bytes_per_s * device.memory_share))

    def _pass(self, rows: float, attention_s: float, expert_ratio: float = 1.0) -> PassTime:
        """`expert_ratio`: a factor on the time of expert products."""
        model = self.deployment.model
        products_s = 0.0
        for mixture, layers in (
            (True, model.num_mixture_layers),
            (False, model.num_hidden_layers - model.num_mixture_layers),
        ):
            if layers:
                products_s += layers * sum(
                    (expert_ratio if p.routed else 1.0) * self._product_s(p, rows)
                    for p in model.projections(mixture=mixture)
                )
        head = Projection("head", model.hidden_size, model.vocab_size, "column")
        products_s += self._product_s(head, min(rows, 256))
        return PassTime(
            products_s,
            attention_s,
            self._network_s(rows),
            model.num_hidden_layers * self.framework.layer_s,
        )

    def _product_s(self, projection: Projection, rows: float) -> float:
        deployment, device = self.deployment, self.deployment.device
        size = projection.inputs * projection.outputs
        if projection.routed:
            # Every GPU has its part of the experts and takes the tokens of all groups that go there.
            all_rows = rows * deployment.dp
            used = projection.experts * (1 - (1 - projection.active / projection.experts) ** all_rows)
            busiest = _busiest_share(all_rows * projection.active, deployment.ep)
            matrices, share_of_peak, idle_rows = (
                busiest * used / deployment.gpus,
                device.expert_share,
                _IDLE_EXPERT_ROWS,
            )
            rows = all_rows * projection.active / used
        else:
            matrices = 1 / (deployment.tp if projection.split != "none" else 1)
            share_of_peak, idle_rows = device.matmul_share, _IDLE_ROWS
        operations = 2 * size * matrices * (rows + idle_rows)
        reading_s = size * matrices * deployment.weight_bytes / (device.memory_bytes_per_s * device.memory_share)
        return max(operations / (device.flops_per_s[deployment.precision] * share_of_peak), reading_s)

    def _network_s(self, rows: float) -> float:
        """All layers' exchanges."""
        deployment, model = self.deployment, self.deployment.model
        exchange_s = 2 * model.num_hidden_layers * self._all_reduce_s(rows * model.hidden_size * 2, deployment.tp)
        if deployment.dp > 1 and model.num_mixture_layers:
            exchange_s += model.num_mixture_layers * self._expert_exchange_s(rows / deployment.tp)
        return exchange_s

    def _expert_exchange_s(self, tokens: float) -> float:
        """Dispatch and combine of one layer, for `tokens` of every GPU."""
        deployment, model = self.deployment, self.deployment.model
        gpus = deployment.gpus
        nodes = self._nodes(gpus)
        if model.num_experts % gpus:
            # Copies of experts fill up the GPUs; a token then moves at most once per expert.
            sent = tokens * model.hidden_size * min(model.num_experts_per_tok, gpus)
            return sum(self._exchange_s("all_to_all", nbytes, gpus) for nbytes in (sent, 2 * sent))
        routing = Routing(
            gpus=gpus,
            nodes=nodes,
            experts=model.num_experts,
            experts_per_token=model.num_experts_per_tok,
            most_nodes=nodes,
        )
        self._warn("dispatch and combine of tokens take their times from DeepEP on nodes of H100.")
        exchange = ExpertAllToAll(routing=routing, hidden=model.hidden_size)
        whole = max(1, round(tokens))
        return exchange.seconds("dispatch", whole) + exchange.seconds("combine", whole)

    def _nodes(self, gpus: int) -> int:
        nodes = max(1, -(-gpus // self.deployment.device.gpus_per_domain))
        while gpus % nodes:
            nodes += 1
        return nodes

    def _all_reduce_s(self, nbytes: float, gpus: int) -> float:
        if gpus == 1:
            return 0.0
        ring_s = self._exchange_s("all_reduce", nbytes, gpus)
        if not self.framework.one_shot or gpus > self.deployment.device.gpus_per_domain:
            return ring_s
        pair = self.costs.curve("all_reduce", 2)
        return min(ring_s, pair.startup_s + (gpus - 1) * nbytes / pair.plateau_bytes_per_s)

    def _exchange_s(self, operation: str, nbytes: float, gpus: int) -> float:
        found = self.costs.estimate(operation, nbytes, gpus, self._nodes(gpus))
        for warning in found.warnings:
            self._warn(warning)
        return found.seconds

    def _warn(self, warning: str) -> None:
        if warning not in self.warnings:
            self.warnings.append(warning)


def _busiest_share(tokens: float, groups: int) -> float:
    """The load of the busiest group relative to the mean, where tokens choose experts independently of each other."""
    if groups == 1:
        return 1.0
    return min(float(groups), 1 + math.sqrt(2 * math.log(groups) * groups / max(1.0, tokens)))
