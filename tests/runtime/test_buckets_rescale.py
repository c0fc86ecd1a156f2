"""Buckets rescale what they remember of gradients, and nothing else."""

from __future__ import annotations

import torch
from torch import nn

from laconic.core.tensor import TensorSpec
from laconic.runtime.buckets import Buckets
from laconic.strategy import Strategy


def test_rescale_reaches_every_bucket_and_only_the_fields_with_a_unit() -> None:
    strategy = Strategy.parse("bsp / all_reduce / powersgd(rank=1) + error_feedback / wfbp")
    parameters = {name: nn.Parameter(torch.zeros(6, 8)) for name in ("first", "second")}
    plan = strategy.plan([TensorSpec.of(name, value) for name, value in parameters.items()])
    buckets = Buckets(plan, strategy, parameters, {})
    assert len(buckets.states) == 2
    for state in buckets.states:
        state.flat["error_feedback.residual"].fill_(3.0)
    before = [{name: q.clone() for name, q in state.whole["powersgd.q"].items()} for state in buckets.states]
    buckets.rescale(torch.tensor(0.5))
    for state, bases in zip(buckets.states, before, strict=True):
        assert bool((state.flat["error_feedback.residual"] == 1.5).all())
        assert all(torch.equal(state.whole["powersgd.q"][name], q) for name, q in bases.items())
