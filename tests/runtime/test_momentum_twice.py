"""Methods that keep momentum on the workers: the optimizer's own would be counted twice."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import laconic
from laconic.core.in_process import InProcessTransport
from laconic.errors import AttachError, LaconicWarning
from tests.runtime.replicas import mlp

KEEP_MOMENTUM = [
    "bsp / all_reduce / dgc / fusion",
    "bsp / all_reduce / dgc(density=0.1) + warmup / fusion",
    "bsp / all_reduce / topk + error_feedback + momentum_correction / fusion",
    "bsp / all_reduce / topk + error_feedback + momentum_correction + per_layer / fusion",
    "bsp / parameter_server / dgc / fusion",
    "asp / parameter_server / dgc",
    "demo / all_reduce / dct_topk",
]


def attach(strategy: str, make_optimizer) -> list[str]:
    """Attach and detach on two ranks; what was warned of."""

    def one_rank(transport: InProcessTransport) -> None:
        model = mlp()
        laconic.attach(model, make_optimizer(model), strategy, transport=transport).detach()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        laconic.InProcessCluster(2).run(one_rank)
    assert all(warning.filename == __file__ for warning in caught if "momentum" in str(warning.message))
    return [str(warning.message) for warning in caught if warning.category is LaconicWarning]


def sgd(momentum: float):
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)

    return make


@pytest.mark.parametrize("strategy", KEEP_MOMENTUM)
def test_sgd_with_momentum_is_refused_before_anything_is_touched(strategy: str) -> None:
    def one_rank(transport: InProcessTransport) -> None:
        model = mlp()
        optimizer = sgd(0.9)(model)
        with pytest.raises(AttachError, match=r"keeps momentum itself, and SGD has momentum=0.9.*SGD\(.*momentum=0\)"):
            laconic.attach(model, optimizer, strategy, transport=transport)
        laconic.attach(model, optimizer, "bsp", transport=transport).detach()

    laconic.InProcessCluster(2).run(one_rank)


@pytest.mark.parametrize("strategy", [text for text in KEEP_MOMENTUM if "server" not in text])
def test_without_momentum_nothing_is_said_and_with_adam_a_warning(strategy: str) -> None:
    assert attach(strategy, sgd(0.0)) == []
    told = attach(strategy, lambda model: torch.optim.AdamW(model.parameters(), lr=0.1))
    assert told
    assert all("AdamW averages gradients over steps as well (betas[0]=0.9)" in message for message in told)


@pytest.mark.parametrize(
    "strategy",
    [
        "bsp / all_reduce / dgc(momentum=0)",
        "bsp / all_reduce / topk + error_feedback",
        "decoupled_momentum / all_reduce / dct_topk",
    ],
)
def test_momentum_is_the_optimizers_where_the_method_keeps_none(strategy: str) -> None:
    assert attach(strategy, sgd(0.9)) == []
