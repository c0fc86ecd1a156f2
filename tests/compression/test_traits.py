"""What compressors say about themselves: it follows from their settings and from what they wrap, and it is true."""

from __future__ import annotations

import pytest
import torch

from laconic.compression import (
    Chain,
    Compressor,
    Dgc,
    ErrorFeedback,
    Fp8,
    Int8,
    MomentumCorrection,
    NoCompression,
    PerLayer,
    PowerSgd,
    Qsgd,
    RandomK,
    SignSgd,
    Threshold,
    TopK,
    Warmup,
    Wrapper,
)
from laconic.compression.traits import Traits
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.errors import IllegalCombination
from laconic.strategy import Strategy
from tests.strategy.generate import variants

BUCKET = Bucket((TensorSpec("weight", (70, 90)), TensorSpec("bias", (90,))))
ALL: list[Compressor] = [method for method in variants("compression") if isinstance(method, Compressor)]
every_compressor = pytest.mark.parametrize("compressor", ALL, ids=str)


@pytest.mark.parametrize(
    ("usual", "changed", "name"),
    [
        (Fp8(), Fp8(rounding="stochastic"), "unbiased"),
        (Int8(), Int8(rounding="stochastic"), "unbiased"),
        (RandomK(), RandomK(scale=True), "unbiased"),
        (RandomK(), RandomK(scale=True), "wants_error_feedback"),
        (RandomK(), RandomK(scale=True), "amplifies"),
        (Qsgd(), Qsgd(levels=1), "amplifies"),
        (Dgc(), Dgc(clip_norm=1.0), "scale_equivariant"),
    ],
    ids=str,
)
def test_a_setting_can_change_a_trait(usual: Compressor, changed: Compressor, name: str) -> None:
    assert getattr(usual.traits, name) is not getattr(changed.traits, name)


def test_wrappers_change_what_they_wrap() -> None:
    inner = RandomK()
    assert Warmup(inner).traits == PerLayer(Warmup(inner)).inner.traits
    fed_back = ErrorFeedback(inner).traits
    assert fed_back.keeps_residual
    assert not fed_back.wants_error_feedback
    velocity = MomentumCorrection(NoCompression()).traits
    assert velocity.accumulates
    assert not velocity.lossless
    assert torch.complex64 in velocity.dtypes, "as without it"
    assert not Warmup(Threshold()).traits.exact_bytes
    assert not PerLayer(PowerSgd()).traits.decodes_alone
    assert PerLayer(PowerSgd()).traits.sums_only
    assert PerLayer(RandomK()).traits.needs_whole_tensors


@every_compressor
def test_own_traits_leave_out_what_is_wrapped(compressor: Compressor) -> None:
    if not isinstance(compressor, Wrapper):
        assert compressor.own_traits == compressor.traits
    elif isinstance(compressor, Warmup):
        assert compressor.own_traits == Traits(warms_up=True)
    assert compressor.traits.keeps_residual == any(layer.own_traits.keeps_residual for layer in compressor.layers())
    assert compressor.traits.accumulates == any(layer.own_traits.accumulates for layer in compressor.layers())
    assert compressor.traits.keeps_scale == all(layer.own_traits.keeps_scale for layer in compressor.layers())


@every_compressor
def test_rounds_are_as_the_traits_say(compressor: Compressor) -> None:
    traits = compressor.traits
    rounds = compressor.rounds(BUCKET, Moment.steady(4))
    if traits.payloads_add_up or traits.sums_only:
        assert {round.kind for round in rounds} == {"sum"}
    if traits.payloads_add_up:
        assert traits.decodes_alone
        assert compressor.num_waits(BUCKET, Moment.steady(4)) == 1
    assert not traits.lossless or traits.loss_gap is None


def test_a_chain_is_what_both_methods_are() -> None:
    """Each of these was once asked of the first method only."""
    signs = Chain(TopK(), second=SignSgd())
    assert not signs.traits.keeps_scale
    assert not signs.back().traits.keeps_scale, "a server must not send changes of parameters back as signs"
    enlarged = Chain(TopK(density=0.05), second=Qsgd(levels=3))
    assert enlarged.traits.amplifies
    with pytest.raises(IllegalCombination, match="would grow"):
        Strategy(compression=ErrorFeedback(enlarged))


@pytest.mark.parametrize(("second", "grows"), [(Qsgd(levels=3), True), (Qsgd(), False), (Int8(), False)], ids=str)
def test_a_residual_of_what_amplifies_grows(second: Compressor, grows: bool) -> None:
    """Nothing new comes in after the first step, so what is left should shrink."""
    compressor = ErrorFeedback(Chain(TopK(density=0.05), second=second))
    bucket = Bucket((TensorSpec("weight", (20_000,)),))
    state = compressor.init(bucket)
    flat = torch.randn(bucket.numel, generator=torch.Generator().manual_seed(0))
    first = flat.norm()
    for step in range(60):
        state.moment = Moment(step)
        compressor.encode(flat, state)
        flat = torch.zeros_like(flat)
    assert compressor.inner.traits.amplifies == grows
    assert (state.flat["error_feedback.residual"].norm() > 2 * first) == grows
