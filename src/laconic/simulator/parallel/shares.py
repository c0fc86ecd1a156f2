"""How a plan divides a model: layers of each stage, parameters of each rank."""

from __future__ import annotations

from typing import NamedTuple

from laconic.simulator.parallel.plan import Plan
from laconic.workload.transformer import Transformer


class RankParameters(NamedTuple):
    """Parameters of one rank, before any sharding over its replicas."""

    shared: float = 0.0
    """Parameters that every data-parallel rank has too."""
    routed: float = 0.0
    """Parameters of experts, which fewer ranks have."""

    @property
    def total(self) -> float:
        """The sum of both."""
        return self.shared + self.routed

    def plus(self, other: RankParameters, times: float = 1.0) -> RankParameters:
        """The sum of these parameters and `times` the other ones."""
        return RankParameters(self.shared + times * other.shared, self.routed + times * other.routed)

    def sharded(self, plan: Plan) -> float:
        """The share of one rank when parameters are divided among all ranks that hold the same ones."""
        return self.shared / replicas(plan) + self.routed / expert_replicas(plan)


def replicas(plan: Plan) -> int:
    """Ranks with the same parameters."""
    return plan.dp * plan.cp


def expert_replicas(plan: Plan) -> int:
    """Ranks with the same experts."""
    return plan.stage_gpus // plan.ep


def stage_layers(model: Transformer, plan: Plan, stage: int) -> tuple[int, int]:
    """Dense layers and layers with experts in one stage; the first have one more if pp does not divide the layers."""
    each, more = divmod(model.num_hidden_layers, plan.pp)
    begin = stage * each + min(stage, more)
    count = each + (1 if stage < more else 0)
    dense_layers = model.num_hidden_layers - model.num_mixture_layers
    dense = max(0, min(count, dense_layers - begin))
    return dense, count - dense


def layer_parameters(model: Transformer, plan: Plan, *, mixture: bool) -> RankParameters:
    """Parameters of one layer."""
    shared, routed = float(model.norm_parameters()), 0.0
    for projection in model.projections(mixture=mixture):
        if projection.routed:
            routed += projection.parameters / plan.ep
        else:
            shared += projection.parameters / (1 if projection.split == "none" else plan.tp)
    return RankParameters(shared, routed)


def stage_parameters(model: Transformer, plan: Plan, stage: int) -> RankParameters:
    """Parameters of all layers of a stage, with the embedding and the output layer at the ends."""
    found = RankParameters()
    for mixture, count in zip((False, True), stage_layers(model, plan, stage), strict=True):
        if count:
            found = found.plus(layer_parameters(model, plan, mixture=mixture), count)
    first, last = stage == 0, stage == plan.pp - 1
    ends, norm = 0, 0
    if first:
        ends += model.embedding_parameters()
    if last:
        norm = model.hidden_size * (2 if model.bias else 1)
        # A tied output layer is the embedding; where that is in another stage, the last has a copy.
        ends += 0 if first and model.tie_word_embeddings else model.vocab_size * model.hidden_size
    return found.plus(RankParameters(ends / plan.tp + norm))
