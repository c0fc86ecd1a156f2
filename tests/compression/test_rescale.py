"""A GradScaler changes the unit of gradients; what compressors remember in that unit follows, and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from laconic.compression import Compressor, Dgc, ErrorFeedback, MomentumCorrection, PerLayer, TopK
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.tensor import TensorSpec
from laconic.strategy import Strategy
from laconic.synchronization import SYNCHRONIZATIONS
from tests.compression.test_laws import bits, exchange, values
from tests.strategy.generate import changed_wrappers, variants

BUCKET = Bucket((TensorSpec("weight", (70, 90)), TensorSpec("bias", (90,))))
ALL: list[Compressor] = [
    *(method for method in variants("compression") if isinstance(method, Compressor)),
    *changed_wrappers(),
    Dgc(clip_norm=0.1),
]
ABSOLUTE: dict[str, Callable[[Compressor], bool]] = {
    "threshold": lambda base: True,  # tau is an absolute magnitude
    "dgc": lambda base: bool(getattr(base, "clip_norm", 0)),  # and so is clip_norm
    "signsgd": lambda base: True,  # a vote is +1 or -1
}
"""Methods whose output does not scale with their input, where that depends on a setting only with that."""
NO_UNIT = {"powersgd.q", "acpsgd.p", "acpsgd.q"}
"""Fields that have no unit: of a basis only the space that it spans matters."""


def scaled_fields(compressor: Compressor) -> frozenset[str]:
    return frozenset[str]().union(*(layer.scaled_fields for layer in compressor.layers()))


def gradient(rank: int, step: int, size: float = 1024) -> torch.Tensor:
    # As a rule well within the range of fp16, where halving and doubling change no digit.
    return size * values(rank, step, BUCKET.numel, BUCKET.dtype)


def two_ways(compressor: Compressor, ratio: float, *, rescale: bool) -> list[tuple[torch.Tensor, ...]]:
    """Two steps in the old unit, then two more in the old unit and in the new one; results of both, and states."""
    # Absolute magnitudes in settings are near one and near a thousandth.
    size = 1024 if compressor.traits.scale_equivariant else 0.01

    def one_rank(transport: InProcessTransport) -> tuple[torch.Tensor, ...]:
        old = compressor.init(BUCKET)
        for step in range(2):
            exchange(compressor, gradient(transport.rank, step, size), old, transport, step=step)
        new: BucketState = copy.deepcopy(old)
        if rescale:
            new.rescale(ratio, scaled_fields(compressor))
        found = []
        for step in range(2, 4):
            flat = gradient(transport.rank, step, size)
            scaled = ratio * flat
            exchange(compressor, flat, old, transport, step=step)
            exchange(compressor, scaled, new, transport, step=step)
            found += [ratio * flat, scaled]
        for name, fields in old.by_parameter().items():
            for field, value in fields.items():
                if field not in NO_UNIT:
                    found += [ratio * value, new.by_parameter()[name][field]]
        return tuple(found)

    return InProcessCluster(2).run(one_rank)


@pytest.mark.parametrize("compressor", ALL, ids=str)
@pytest.mark.parametrize("ratio", [2.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_twice_the_input_gives_exactly_twice_the_output(compressor: Compressor, ratio: float) -> None:
    same = all(
        bits(expected) == bits(found)
        for rank in two_ways(compressor, ratio, rescale=True)
        for expected, found in zip(rank[::2], rank[1::2], strict=True)
    )
    # In the first steps of a warm-up something else is sent, which may well follow.
    if compressor.traits.scale_equivariant or not compressor.traits.warms_up:
        assert same == compressor.traits.scale_equivariant


@pytest.mark.parametrize("compressor", ALL, ids=str)
def test_the_law_can_fail(compressor: Compressor) -> None:
    """Without rescaling, whatever remembers gradients adds up values of two units."""
    remembers = bool(scaled_fields(compressor)) and compressor.traits.scale_equivariant
    # In the first steps of warmup nothing is lost, so no residual has a unit yet.
    state = compressor.init(BUCKET)
    exchange_alone(compressor, state)
    if remembers and any(state.flat.get(field, torch.zeros(1)).any() for field in scaled_fields(compressor)):
        rank, *_ = two_ways(compressor, 2.0, rescale=False)
        assert any(bits(expected) != bits(found) for expected, found in zip(rank[::2], rank[1::2], strict=True))


def exchange_alone(compressor: Compressor, state: BucketState) -> None:
    InProcessCluster(1).run(lambda transport: exchange(compressor, gradient(0, 0), state, transport))


@pytest.mark.parametrize("compressor", ALL, ids=str)
def test_exceptions_are_known_by_name(compressor: Compressor) -> None:
    *_, base = compressor.layers()
    assert compressor.traits.scale_equivariant == (not ABSOLUTE.get(base.name, lambda base: False)(base))


@pytest.mark.parametrize("compressor", ALL, ids=str)
def test_every_field_has_a_unit_or_is_known_to_have_none(compressor: Compressor) -> None:
    fields = {field for fields in compressor.init(BUCKET).by_parameter().values() for field in fields}
    assert fields - NO_UNIT <= scaled_fields(compressor)
    assert not fields & NO_UNIT & scaled_fields(compressor)
    assert scaled_fields(compressor) <= {field for layer in compressor.layers() for field in layer.on_resize}


def test_parts_and_tensors_as_ratios() -> None:
    compressor = PerLayer(MomentumCorrection(ErrorFeedback(TopK(density=0.1))))
    state = compressor.init(BUCKET)
    exchange_alone(compressor, state)
    before = {name: value.clone() for name, value in state.parts[0].flat.items()}
    assert set(before) == scaled_fields(compressor) - {"error_feedback.owed"}  # topk sends no sums back
    state.rescale(torch.tensor(4.0), scaled_fields(compressor))
    for name, value in state.parts[0].flat.items():
        assert torch.equal(value, 4 * before[name])
    state.rescale(0.25, {"error_feedback.residual"})
    assert torch.equal(state.parts[0].flat["error_feedback.residual"], before["error_feedback.residual"])
    assert not torch.equal(state.parts[0].flat["momentum_correction.velocity"], before["momentum_correction.velocity"])


def test_a_strategy_knows_all_fields() -> None:
    strategy = Strategy.parse("bsp / all_reduce / topk + error_feedback + momentum_correction")
    owed = {"error_feedback.residual", "error_feedback.owed"}
    assert strategy.scaled_fields() == {*owed, "momentum_correction.velocity"}
    assert Strategy.parse("demo / all_reduce / dct_topk").scaled_fields() == {"demo.momentum"}
    assert Strategy.parse("dion").scaled_fields() == {"dion.momentum"}
    assert Strategy.parse("bsp").scaled_fields() == frozenset()


def test_a_strategy_knows_whether_a_grad_scaler_fits() -> None:
    for text, fits in {"bsp": True, "bsp / all_reduce / signsgd": False, "demo / all_reduce / dct_topk": False}.items():
        assert Strategy.parse(text).scale_equivariant() == fits


def test_rules_on_gradients_say_which_of_their_fields_have_the_unit_of_gradients() -> None:
    for kind in SYNCHRONIZATIONS:
        expected = set() if kind.quantity == "change" else set(kind.fields) - {kind().anchor}
        assert set(kind.scaled_fields) == expected, "changes of parameters are never scaled"
