"""Work that is slow the first time, done before a rank joins the others, which would wait for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from laconic.core.exchange import Wire
from laconic.core.in_process import InProcessCluster
from laconic.core.moment import Moment
from laconic.runtime.shards import specs_of
from laconic.strategy import Strategy


def warm_up(strategy: Strategy, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Exchange a bucket of each shape once in a group of one rank, which compiles the kernels."""
    alone = InProcessCluster(1).transport(0)
    with torch.no_grad():
        for plan in strategy.plans([*reversed(specs_of(model, parameters).values())], 1):
            for number, bucket in enumerate(plan.buckets):
                state = strategy.init(bucket)
                flat = torch.randn(bucket.numel, dtype=torch.float32).to(bucket.device, bucket.dtype)
                state.moment = Moment.steady(1)
                for work in strategy.architecture.exchange(flat, state, strategy.codec, Wire(alone, "a trial", number)):
                    work.wait()
