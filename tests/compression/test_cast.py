"""fp16 and bf16 against numpy, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from laconic.compression import Bf16, Compressor, Fp16
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from tests.compression.test_laws import exchange, one_bucket, values


def round_to_bf16(array: np.ndarray) -> np.ndarray:
    """Round fp32 to the nearest value whose lower 16 bits are zero, ties to even; by integer arithmetic."""
    whole = array.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (whole + 0x7FFF + ((whole >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


def round_to_fp16(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("compressor", "round_off"), [(Fp16(), round_to_fp16), (Bf16(), round_to_bf16)], ids=["fp16", "bf16"]
)
def test_formula(compressor: Compressor, round_off, world_size: int) -> None:
    """decoded = widen(sum of round(g_i)), where every partial sum is rounded too."""
    bucket = one_bucket(10_007, torch.float32)

    def rank(transport: InProcessTransport) -> np.ndarray:
        flat = values(transport.rank, 0, bucket.numel, bucket.dtype)
        exchange(compressor, flat, compressor.init(bucket), transport)
        return flat.numpy()

    expected = round_off(values(0, 0, bucket.numel, bucket.dtype).numpy())
    for other in range(1, world_size):
        expected = round_off(expected + round_off(values(other, 0, bucket.numel, bucket.dtype).numpy()))
    for found in InProcessCluster(world_size).run(rank):
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def _alone(compressor: Compressor, value: float) -> float:
    flat = torch.tensor([value])
    bucket = one_bucket(1, torch.float32)
    exchange(compressor, flat, compressor.init(bucket), InProcessCluster(1).transport(0))
    return flat.item()


def test_ranges() -> None:
    assert _alone(Fp16(), 65504.0) == 65504.0
    assert _alone(Fp16(), 65536.0) == float("inf"), "beyond the largest fp16 values become infinite, as documented"
    assert _alone(Fp16(), 1e-8) == 0.0
    assert _alone(Bf16(), 3e38) == pytest.approx(3e38, rel=2**-8)
    assert _alone(Bf16(), 1e-38) == pytest.approx(1e-38, rel=2**-8)


def test_precision() -> None:
    assert _alone(Fp16(), 1 + 2**-10) == 1 + 2**-10
    assert _alone(Fp16(), 1 + 2**-11) == 1.0, "11 significant bits, ties to even"
    assert _alone(Bf16(), 1 + 2**-7) == 1 + 2**-7
    assert _alone(Bf16(), 1 + 2**-8) == 1.0, "8 significant bits, ties to even"


@pytest.mark.parametrize("compressor", [Fp16(), Bf16()], ids=str)
def test_a_gradient_that_has_the_type_already_is_sent_in_place(compressor: Fp16 | Bf16) -> None:
    flat = values(0, 0, 100, compressor.wire_dtype)
    payload = compressor.encode(flat, compressor.init(one_bucket(100, compressor.wire_dtype)))
    assert payload.tensors[0] is flat


DRAWING = [Fp16(rounding="stochastic"), Bf16(rounding="stochastic")]
drawing = pytest.mark.parametrize("compressor", DRAWING, ids=str)


def drawn(compressor: Compressor, flat: torch.Tensor, moment: Moment) -> torch.Tensor:
    """What is sent, widened to float64."""
    state = compressor.init(one_bucket(len(flat), flat.dtype))
    state.moment = moment
    return compressor.encode(flat, state).tensors[0].double()


def neighbours(flat: torch.Tensor, wire_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of a type below and above, in magnitude."""
    nearest = flat.abs().to(wire_dtype)
    whole = nearest.view(torch.int16)
    below = torch.where(nearest.double() > flat.abs().double(), whole - 1, whole)
    above = torch.where(below.view(wire_dtype).double() < flat.abs().double(), below + 1, below)
    return below.view(wire_dtype).double() * flat.sign(), above.view(wire_dtype).double() * flat.sign()


@drawing
def test_stochastic_rounding_goes_to_a_neighbour_and_is_right_on_average(compressor: Fp16 | Bf16) -> None:
    flat = values(0, 0, 200, torch.float32)
    flat[::5] *= 1e-7  # fp16 has even steps of 2^-24 there
    below, above = neighbours(flat, compressor.wire_dtype)
    steps = 400
    found = torch.stack([drawn(compressor, flat, Moment(step)) for step in range(steps)])
    assert ((found == below) | (found == above)).all()
    share = ((flat.double() - below) / (above - below)).nan_to_num()
    spread = (above - below).abs() * (share * (1 - share) / steps).sqrt()
    assert ((found.mean(0) - flat.double()).abs() <= 4.5 * spread + 1e-12 * flat.abs()).all()


@drawing
def test_stochastic_rounding_keeps_what_needs_no_rounding(compressor: Fp16 | Bf16) -> None:
    exact = [0.0, -0.0, 1.0, -1.5, 2.0**-14, 2.0**-20, 0.0078125, float("inf"), -float("inf")]
    found = drawn(compressor, torch.tensor(exact), Moment(3))
    assert [str(value) for value in found.tolist()] == [str(value) for value in exact]
    assert drawn(compressor, torch.tensor([float("nan"), -float("nan")]), Moment()).isnan().all()
    # A NaN whose payload sits in the lower half must not turn into an infinity.
    hidden = torch.tensor([0x7F800001, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert drawn(compressor, hidden, Moment()).isnan().all()


def test_stochastic_rounding_beyond_the_range() -> None:
    between, beyond = torch.full((400,), 65520.0), torch.tensor([65536.0, 1e30, -1e30])
    assert set(drawn(DRAWING[0], between, Moment()).tolist()) == {65504.0, float("inf")}
    assert drawn(DRAWING[0], beyond, Moment()).tolist() == [float("inf"), float("inf"), -float("inf")]
    assert set(drawn(DRAWING[1], torch.full((400,), 3.4e38), Moment()).tolist()) <= {
        3.3895313892515355e38,
        float("inf"),
    }


@drawing
def test_stochastic_rounding_belongs_to_step_parameter_and_rank(compressor: Fp16 | Bf16) -> None:
    flat = values(0, 0, 9000, torch.float32)
    first = drawn(compressor, flat, Moment(1, 0, 2))
    assert torch.equal(first, drawn(compressor, flat, Moment(1, 0, 2)))
    for moment in (Moment(2, 0, 2), Moment(1, 1, 2)):
        assert not torch.equal(first, drawn(compressor, flat, moment))
    bucket = Bucket((TensorSpec("before", (77,)), TensorSpec("weight", (9000,))))
    state = compressor.init(bucket)
    state.moment = Moment(1, 0, 2)
    together = compressor.encode(torch.cat([flat[:77], flat]), state).tensors[0].double()
    assert torch.equal(together[77:], first)
    assert not torch.equal(together[:77], first[:77])


@drawing
def test_stochastic_rounding_sends_a_gradient_of_its_type_in_place(compressor: Fp16 | Bf16) -> None:
    flat = values(0, 0, 100, compressor.wire_dtype)
    payload = compressor.encode(flat, compressor.init(one_bucket(100, compressor.wire_dtype)))
    assert payload.tensors[0] is flat
