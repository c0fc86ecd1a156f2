"""What is read off an optimizer, whatever kind it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laconic.core.optimizer_facts import OptimizerFacts
from laconic.errors import AttachError, LaconicWarning


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(3, 3))]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), OptimizerFacts(name="SGD")),
        (
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
            OptimizerFacts(name="SGD", momentum=0.9, nesterov=True),
        ),
        (
            lambda p: torch.optim.SGD([{"params": p[:1]}, {"params": p[1:], "momentum": 0.5}], lr=0.1),
            OptimizerFacts(name="SGD", momentum=0.5),
        ),
        (lambda p: torch.optim.RMSprop(p, momentum=0.3), OptimizerFacts(name="RMSprop", momentum=0.3, divides=True)),
        (lambda p: torch.optim.AdamW(p, betas=(0.8, 0.9)), OptimizerFacts(name="AdamW", first_beta=0.8, divides=True)),
        (lambda p: torch.optim.Adam(p, betas=(0.0, 0.9)), OptimizerFacts(name="Adam", divides=True)),
        (torch.optim.Adagrad, OptimizerFacts(name="Adagrad", divides=True)),
    ],
)
def test_facts(make, expected: OptimizerFacts) -> None:
    assert OptimizerFacts.of(make(weights())) == expected


def test_several_optimizers_and_strange_groups() -> None:
    first, second = weights()
    sgd, adamw = torch.optim.SGD([first], lr=0.1, momentum=0.95), torch.optim.AdamW([second])
    expected = OptimizerFacts(name="SGD and AdamW", momentum=0.95, first_beta=0.9, divides=True)
    assert OptimizerFacts.of(sgd, adamw) == expected
    sgd.param_groups[0]["momentum"] = None
    sgd.param_groups[0]["betas"] = "none"
    assert OptimizerFacts.of(sgd) == OptimizerFacts(name="SGD")


def test_a_second_momentum_is_refused_and_a_second_average_is_warned_of() -> None:
    OptimizerFacts(name="SGD").check_no_momentum("x", "y")
    with pytest.raises(AttachError, match=r"momentum=0.9: .* Write SGD\(\.\.\., momentum=0\), or leave x out\."):
        OptimizerFacts(name="SGD", momentum=0.9).check_no_momentum("x", "leave x out")
    with pytest.raises(AttachError, match="momentum=0, nesterov=False"):
        OptimizerFacts(name="SGD", momentum=0.9, nesterov=True).check_no_momentum("x", "leave x out")
    with pytest.warns(LaconicWarning, match=r"AdamW averages gradients .*betas\[0\]=0.9.* or leave x out\.") as caught:
        OptimizerFacts(name="AdamW", first_beta=0.9).check_no_momentum("x", "leave x out")
    assert caught[0].filename == __file__, "at the user's line"
