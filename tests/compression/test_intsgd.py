"""intsgd and the words its codes travel in, beside the paper's formulas in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from laconic.compression import ErrorFeedback, IntSgd
from laconic.compression.kernels.lanes import new_numbers, pack, unpack
from laconic.compression.wire.lanes import Lanes
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.errors import MethodError
from tests.compression.test_laws import exchange, values

pytestmark = pytest.mark.timeout(60)
BUCKET = Bucket((TensorSpec("weight", (40, 50)), TensorSpec("nothing", (0,)), TensorSpec("bias", (30,))))
PLACES = (slice(0, 2000), slice(2000, 2030))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("largest", [1, 30, 62, 1000])
@pytest.mark.parametrize("num_values", [0, 1, 1000])
def test_sums_of_words_hold_sums_of_numbers(world_size: int, largest: int, num_values: int) -> None:
    lanes = Lanes(num_values, largest, world_size)
    drawn = np.random.default_rng(0).integers(0, largest, (world_size, num_values), endpoint=True)
    drawn[:, : num_values // 2] = largest  # the worst case of a carry
    words = []
    for row in drawn:
        numbers = new_numbers(lanes, torch.int64, torch.device("cpu"))
        numbers[:num_values] = torch.from_numpy(row)
        words.append(pack(lanes, numbers))
    total = torch.zeros(lanes.num_words, dtype=torch.int64)
    for row in reversed(words):
        total += row
    assert (unpack(lanes, total).numpy() == drawn.sum(0)).all()
    assert lanes.nbytes == words[0].nbytes
    assert lanes.nbytes <= num_values * (lanes.bits + 1) / 8 * 64 / (64 - lanes.bits) + 8


def steps(compressor: IntSgd, world_size: int, count: int) -> list[list[torch.Tensor]]:
    def rank(transport: InProcessTransport) -> list[torch.Tensor]:
        state, found = compressor.init(BUCKET), []
        for step in range(count):
            flat = values(transport.rank, step, BUCKET.numel, BUCKET.dtype)
            exchange(compressor, flat, state, transport, step=step)
            found.append(flat)
        return found

    return InProcessCluster(world_size).run(rank)


def test_formula() -> None:
    """Each result is a whole number of the paper's units, next to the true sum, and r is the paper's moving square."""
    world_size, memory = 3, 0.9
    found = steps(IntSgd(largest=1000), world_size, 4)[0]
    true = [sum(values(rank, step, BUCKET.numel, BUCKET.dtype) for rank in range(world_size)) for step in range(4)]
    assert torch.equal(found[0], true[0]), "the first round is exact"
    for place in PLACES:
        d = place.stop - place.start
        r = float(found[0][place].double().square().sum())
        for step in range(1, 4):
            alpha = np.sqrt(d) / np.sqrt(2 * world_size * r)  # integers are those of alpha times the gradients
            codes = found[step][place].double() * world_size * alpha
            assert torch.allclose(codes, codes.round(), atol=1e-3)
            off = codes - true[step][place].double() * world_size * alpha
            assert off.abs().max() < world_size
            assert off.abs().max() > 0.5, "it rounds"
            r = memory * r + (1 - memory) * float(found[step][place].double().square().sum())


def test_norms_of_large_numbers_do_not_overflow() -> None:
    """All codes are as large as they can be, so the sum of their squares needs more than 64 bits."""
    bucket, world_size = Bucket((TensorSpec("weight", (1 << 18,)),)), 8
    method = IntSgd(largest=1 << 20)

    def rank(transport: InProcessTransport) -> tuple[float, float]:
        state = method.init(bucket)
        exchange(method, torch.zeros(bucket.numel), state, transport, step=0)
        flat = torch.ones(bucket.numel)
        exchange(method, flat, state, transport, step=1)
        return float(state.whole["intsgd.norm"]["weight"]), float(flat.double().norm())

    for norm, decoded in InProcessCluster(world_size).run(rank):
        assert norm == pytest.approx(decoded, rel=1e-5)
        assert decoded > 0
    with pytest.raises(MethodError, match=r"largest=1048576 is too large for 64 ranks.*Give at most 741455"):
        method.rounds(bucket, Moment(1, 0, 64, 1))


def test_right_on_average() -> None:
    """Over many steps of the same gradient errors cancel out."""
    compressor = IntSgd()
    bucket = Bucket((TensorSpec("weight", (500,)),))
    gradient = torch.randn(500, generator=torch.Generator().manual_seed(0))

    def rank(transport: InProcessTransport) -> torch.Tensor:
        state, total = compressor.init(bucket), torch.zeros(500, dtype=torch.float64)
        for step in range(1, 401):
            flat = gradient.clone()
            state.whole["intsgd.norm"]["weight"].fill_(float(2 * gradient.norm()))
            exchange(compressor, flat, state, transport, step=step)
            total += flat
        return total / 400

    mean = InProcessCluster(2).run(rank)[0]
    unit = float(2 * gradient.norm()) * np.sqrt(2 / 2 / 500)
    # Two ranks round by at most half a unit of deviation each, 400 times; 500 values are looked at.
    assert float((mean - 2 * gradient).abs().max()) < 4.5 * unit * np.sqrt(2) / 2 / np.sqrt(400)


def test_codes_are_cut_off_and_the_unit_grows_again() -> None:
    """A jump by a factor of a million arrives small at first; soon it is followed."""

    def rank(transport: InProcessTransport) -> list[float]:
        compressor, found = IntSgd(), []
        state = compressor.init(BUCKET)
        for step in range(12):
            flat = values(transport.rank, 0, BUCKET.numel, BUCKET.dtype) * (1 if step == 0 else 1e6)
            exchange(compressor, flat, state, transport, step=step)
            found.append(float(flat.norm()))
        return found

    norms = InProcessCluster(2).run(rank)[0]
    assert norms[1] < 100 * norms[0]
    assert norms[-1] > 3e5 * norms[0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_spoils_its_parameter_on_all_ranks_and_is_forgotten(bad: float) -> None:
    def rank(transport: InProcessTransport) -> list[torch.Tensor]:
        compressor = ErrorFeedback(IntSgd())
        state, found = compressor.init(BUCKET), []
        for step in range(3):
            flat = values(transport.rank, step, BUCKET.numel, BUCKET.dtype)
            if step == 1 and transport.rank == 1:
                flat[2001] = bad
            exchange(compressor, flat, state, transport, step=step)
            found.append(flat)
        return found

    for _, spoiled, after in InProcessCluster(2).run(rank):
        assert spoiled[:2000].isfinite().all()
        assert spoiled[2000:].isnan().all()
        assert after.isfinite().all()
