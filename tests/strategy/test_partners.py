"""Which synchronization, architecture and compression go together: every triple works or names one that does."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.compression import Compressor
from laconic.errors import AttachError, IllegalCombination, InvalidSetting
from laconic.strategy import AXES, Strategy
from tests.strategy.generate import bases, nearest, wrapped

COMPRESSORS: list[Compressor] = [kind() for kind in bases("compression") if issubclass(kind, Compressor)]
WRAPPED: list[Compressor] = [stack for turn, inner in enumerate(COMPRESSORS) for stack in wrapped(inner, turn)]


@pytest.mark.parametrize(
    "stacks", [COMPRESSORS, pytest.param(WRAPPED, marks=pytest.mark.slow)], ids=["alone", "wrapped"]
)
@pytest.mark.parametrize("when", [kind.name for kind in bases("synchronization")])
@pytest.mark.parametrize("whom", [kind.name for kind in bases("architecture")])
def test_every_triple_is_legal_or_refused_with_a_legal_choice(
    when: str, whom: str, stacks: Sequence[Compressor]
) -> None:
    for what in stacks:
        parts = {
            "synchronization": AXES["synchronization"].lookup(when)(),
            "architecture": AXES["architecture"].lookup(whom)(),
            "compression": what,
        }
        try:
            Strategy(**parts)
        except IllegalCombination as refusal:
            message = str(refusal)
            assert "\n" not in message
            assert re.match(r"(synchronization|architecture|compression|scheduling): ", message)
        # `nearest` parses what the refusal names, which must be legal and canonical.
        found = nearest(parts)
        assert str(Strategy.parse(str(found))) == str(found)
        assert sum(str(getattr(found, axis)) == str(part) for axis, part in parts.items()) >= 1


@pytest.mark.parametrize(
    ("text", "reason", "works"),
    [
        ("diloco / gossip", "diloco works on the mean over all replicas", "diloco / all_reduce / none / fusion"),
        ("slowmo / choco / topk", "slowmo works on the mean over all", "slowmo / all_reduce / topk / fusion"),
        ("demo / push_sum / dct_topk", "demo works on the mean over all", "demo / all_reduce / dct_topk / fusion"),
        ("streaming_diloco / gossip / int4", "over its neighbours", "streaming_diloco / all_reduce / int4 / fusion"),
        (
            "noloco / all_reduce",
            "makes its outer step with a few",
            "noloco / gossip(topology=random_pairs) / none / fusion",
        ),
        (
            "noloco / choco",
            "mixes parameters in a way of its own",
            "noloco / gossip(topology=random_pairs) / none / fusion",
        ),
        ("noloco / gossip / int8", "noloco exchanges parameters with a neighbour", "noloco / gossip / none / fusion"),
        ("bsp / gossip / powersgd", "power_gossip sends differences by it", "bsp / power_gossip / powersgd / fusion"),
        (
            "bsp / power_gossip / powersgd + error_feedback",
            "error_feedback has no place with power_gossip",
            "bsp / power_gossip / powersgd / fusion",
        ),
        ("bsp / power_gossip / int8", "would have to be linear", "bsp / choco / int8 / fusion"),
        (
            "demo / all_reduce / none",
            'demo keeps what is not sent, and "none" sends everything',
            "demo / all_reduce / dct_topk / fusion",
        ),
        (
            "decoupled_momentum / all_reduce / none / wfbp",
            '"none" sends everything',
            "decoupled_momentum / all_reduce / dct_topk / wfbp",
        ),
        (
            "demo / all_reduce / topk + error_feedback",
            "error_feedback would keep what is not sent a second time; demo does that itself",
            "demo / all_reduce / topk / fusion",
        ),
        (
            "demo / all_reduce / bf16 + momentum_correction",
            "momentum_correction would keep what is not sent a second time",
            "demo / all_reduce / bf16 / fusion",
        ),
        ("demo / all_reduce / dgc", "dgc would keep what is not sent", "demo / all_reduce / dct_topk / fusion"),
        (
            "dion / all_reduce / none",
            'dion makes its steps from two thin matrices for each parameter, and "none" does not give any',
            "dion / all_reduce / powersgd / fusion",
        ),
        ("dion / all_reduce / atomo", '"atomo" does not give any', "dion / all_reduce / powersgd / fusion"),
        (
            "dion / all_reduce / acpsgd(rank=2) + warmup(steps=9)",
            '"acpsgd(rank=2) + warmup(steps=9)" does not give them in every step',
            "dion / all_reduce / acpsgd(rank=2) / fusion",
        ),
        (
            "dion / all_reduce / acpsgd + per_layer + error_feedback",
            "error_feedback would keep what is not sent a second time; dion does that itself",
            "dion / all_reduce / acpsgd + per_layer / fusion",
        ),
        ("dion / all_reduce / powersgd + ef21", "in every step", "dion / all_reduce / powersgd / fusion"),
        ("dion / gossip", "dion works on the mean over all", "dion / all_reduce / powersgd / fusion"),
        ("dion / all_reduce / powersgd / priority", "works on their shapes", "dion / all_reduce / powersgd / fusion"),
        (
            "demo / all_reduce / randomk(scale=true)",
            "would grow without bound",
            "demo / all_reduce / topk / fusion",
        ),
        (
            "bsp / choco / topk + error_feedback",
            "error_feedback would keep what is not sent a second time; choco does that itself",
            "bsp / choco / topk / fusion",
        ),
        ("bsp / choco / randomk(scale=true)", "would grow without bound", "bsp / choco / topk / fusion"),
        ("bsp / gossip / topk", "would never be sent; choco keeps public copies", "bsp / choco / topk / fusion"),
        ("bsp / push_sum / bf16", "push_sum mixes parameters", "bsp / choco / bf16 / fusion"),
        ("bsp / gossip / topk + error_feedback", "would never be sent", "bsp / choco / topk / fusion"),
        ("bsp / choco / powersgd", "each payload is decoded by itself", "bsp / choco / topk / fusion"),
        ("bsp / choco / threshold", "has a known length", "bsp / choco / topk / fusion"),
        ("bsp / choco / gtopk", "each payload is decoded by itself", "bsp / choco / topk / fusion"),
        (
            "local_sgd / all_reduce / signsgd",
            "signsgd sends only directions",
            "local_sgd / all_reduce / ef_signsgd / fusion",
        ),
        (
            "diloco / all_reduce / topk + chain(signsgd)",
            "signsgd sends only directions",
            "diloco / all_reduce / topk + chain / fusion",
        ),
        ("bsp / choco / signsgd", "sends only directions", "bsp / choco / ef_signsgd / fusion"),
        (
            "bsp / all_reduce / signsgd(block=64) + error_feedback",
            "error_feedback adds or subtracts what is decoded, and signsgd sends only directions",
            "bsp / all_reduce / ef_signsgd + error_feedback / fusion",
        ),
        (
            "bsp / all_reduce / topk + chain(signsgd) + error_feedback",
            "error_feedback adds or subtracts what is decoded, and signsgd sends only directions",
            "bsp / all_reduce / topk + chain + error_feedback / fusion",
        ),
        (
            "bsp / all_reduce / signsgd + ef21",
            "ef21 adds or subtracts what is decoded, and signsgd sends only directions",
            "bsp / all_reduce / ef_signsgd + ef21 / fusion",
        ),
        (
            "bsp / all_reduce / topk + chain(signsgd) + warmup(steps=9) + ef21",
            "ef21 adds or subtracts what is decoded, and signsgd sends only directions",
            "bsp / all_reduce / topk + chain + warmup(steps=9) + ef21 / fusion",
        ),
        (
            "diloco / all_reduce / dgc",
            "dgc adds up gradients of several steps, but here parameters are exchanged",
            "diloco / all_reduce / none / fusion",
        ),
        (
            "local_sgd / all_reduce / topk + momentum_correction",
            "momentum_correction adds up gradients",
            "local_sgd / all_reduce / topk / fusion",
        ),
    ],
)
def test_refusals(text: str, reason: str, works: str) -> None:
    with pytest.raises(IllegalCombination) as caught:
        Strategy.parse(text)
    assert reason in str(caught.value)
    assert str(caught.value).endswith(f'Nearest that works: "{works}".')
    assert str(Strategy.parse(works)) == works


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("local_sgd(period=0)", r'period must be a whole number >= 1, got 0\. To average every step use "bsp"\.'),
        ("diloco(period=-3)", r"period must be a whole number >= 1, got -3"),
        ("streaming_diloco(period=4, overlap=4)", r"overlap must be < period \(4\), got 4"),
        ("streaming_diloco(period=4, overlap=9)", r"overlap must be < period \(4\), got 9"),
        ("streaming_diloco(period=4, fragments=5)", r"fragments must be <= period \(4\), got 5"),
        ("streaming_diloco(alpha=1.5)", r"alpha must be a number >= 0 and <= 1, got 1\.5"),
        ("diloco(lr=0)", r"lr must be a number > 0, got 0"),
        ("bsp / choco(gamma=-0.1)", r"gamma must be a number >= 0 and <= 1, got -0\.1"),
        ("bsp / choco(exponential)", r'topology must be one of the known choices, got "exponential"'),
        ("bsp / gossip(random_targets)", r'topology must be one of the known choices, got "random_targets"'),
    ],
)
def test_settings_out_of_range(text: str, message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        Strategy.parse(text)


LOCAL = ["local_sgd", "streaming_diloco / all_reduce / int4 + error_feedback", "bsp / gossip", "bsp / choco / topk"]


@pytest.mark.parametrize("strategy", LOCAL)
@pytest.mark.parametrize("promise", [True, False])
def test_find_unused_parameters_is_refused_where_no_gradients_are_exchanged(strategy: str, promise: bool) -> None:
    model = nn.Linear(2, 2)
    transport = laconic.InProcessCluster(1).transport(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(AttachError, match=r"find_unused_parameters has no effect with strategy .* Leave it out\."):
        laconic.attach(model, optimizer, strategy, transport=transport, find_unused_parameters=promise)
    laconic.attach(model, optimizer, strategy, transport=transport).detach()


@pytest.mark.parametrize("strategy", LOCAL)
def test_a_model_wrapped_in_ddp_is_refused_where_no_gradients_are_exchanged(strategy: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(
            AttachError, match=r"averages gradients in every step; .* Attach to the plain module \(ddp\.module\)"
        ):
            laconic.attach(model, optimizer, strategy)
        laconic.attach(model.module, optimizer, strategy).detach()
    finally:
        dist.destroy_process_group()
