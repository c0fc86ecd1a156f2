"""thc and its rotation, beside scipy-free formulas written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from laconic.compression import Thc
from laconic.compression.kernels.rotation import backward, forward
from laconic.compression.wire.rotation import Rotation
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from tests.compression.test_laws import exchange, values

pytestmark = pytest.mark.timeout(60)
BUCKET = Bucket((TensorSpec("weight", (37, 3)), TensorSpec("nothing", (0,)), TensorSpec("bias", (13,))))
BLOCKS = (64, 32, 8, 4, 2, 1, 8, 4, 1)
"""111 and 13 values in powers of two, the longest being 64."""


def hadamard(size: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(size)


def test_rotation_is_hadamard_times_signs() -> None:
    rotation = Rotation(BUCKET, 100)
    assert tuple(rotation.lengths.tolist()) == BLOCKS
    seed, flat = 12345, values(0, 0, BUCKET.numel, torch.float32)
    signs = torch.empty_like(flat)
    backward(forward(torch.ones_like(flat), rotation, seed), rotation, seed, signs)
    assert torch.allclose(signs, torch.ones_like(flat), atol=1e-5), "backward undoes forward"
    start = 0
    rotated = forward(flat, rotation, seed)
    drawn = (forward(flat.abs() + 1, rotation, seed), forward(flat.abs() + 1, rotation, seed + 1))
    assert not torch.equal(*drawn), "other steps have other signs"
    for size in BLOCKS:
        place = slice(start, start + size)
        # H y = D x, so x is found again up to signs of one.
        unsigned = torch.from_numpy(hadamard(size)).float() @ rotated[place]
        assert torch.allclose(unsigned.abs(), flat[place].abs(), atol=1e-5)
        start += size


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_lie_on_the_grid_next_to_the_sum(world_size: int) -> None:
    """The sum of the ranks' rotated values, each rounded to a neighbour on a grid of width 2 clip s / levels."""
    method = Thc(block=64, clip=8.0, levels=100)  # so wide that hardly anything is cut off

    def rank(transport: InProcessTransport) -> torch.Tensor:
        flat = values(transport.rank, 0, BUCKET.numel, torch.float32)
        exchange(method, flat, method.init(BUCKET), transport, step=0)
        return flat

    found = InProcessCluster(world_size).run(rank)[0]
    inputs = [values(rank, 0, BUCKET.numel, torch.float32).double() for rank in range(world_size)]
    start = 0
    for size in BLOCKS:
        place = slice(start, start + size)
        scale = sum(float(x[place].norm()) ** 4 for x in inputs) ** 0.25 / np.sqrt(size)
        unit = 2 * 8.0 * scale / 100
        # A rotation keeps norms: every rank is off by less than a unit per value.
        error = (found[place].double() - sum(x[place] for x in inputs)).norm()
        assert error < world_size * unit * np.sqrt(size)
        start += size


def test_values_too_small_to_compute_with_arrive_as_zeros() -> None:
    bucket = Bucket((TensorSpec("weight", (64,)),))

    def rank(transport: InProcessTransport) -> torch.Tensor:
        flat = torch.full((64,), 1e-40)
        exchange(Thc(), flat, Thc().init(bucket), transport, step=0)
        return flat

    assert all(torch.equal(flat, torch.zeros(64)) for flat in InProcessCluster(2).run(rank))


def test_errors_cancel_out() -> None:
    method = Thc(levels=6)
    bucket = Bucket((TensorSpec("weight", (300,)),))
    gradient = torch.randn(300, generator=torch.Generator().manual_seed(0))

    def rank(transport: InProcessTransport) -> tuple[float, float]:
        total, first = torch.zeros(300), 0.0
        for step in range(200):
            flat = gradient.clone()
            exchange(method, flat, method.init(bucket), transport, step=step)
            total += flat
            first = first or float((flat - 2 * gradient).norm())
        return first, float((total / 200 - 2 * gradient).norm())

    first, mean = InProcessCluster(2).run(rank)[0]
    assert mean < first / 8, "200 independent errors average to a fourteenth; what is cut off adds a little"


def test_an_outlier_costs_little_and_what_is_not_finite_stays_in_its_block() -> None:
    bucket = Bucket((TensorSpec("weight", (2048,)),))

    def rank(transport: InProcessTransport) -> torch.Tensor:
        flat = torch.zeros(2048)
        flat[5] = 1000.0  # rotated, all values of its block have the same size
        flat[1024] = float("nan") if transport.rank else 0.0
        exchange(Thc(), flat, Thc().init(bucket), transport, step=0)
        return flat

    for flat in InProcessCluster(2).run(rank):
        assert flat[5] == pytest.approx(2000.0, rel=0.05)
        assert flat[1024:].isnan().all()
        assert flat[:1024].isfinite().all()


def test_values_whose_sums_are_infinite_arrive_as_nan() -> None:
    bucket = Bucket((TensorSpec("weight", (64,)), TensorSpec("bias", (64,))))

    def rank(transport: InProcessTransport) -> torch.Tensor:
        flat = torch.ones(128)
        flat[:64] = 1e38  # their sum is beyond float32, though each of them is not
        exchange(Thc(), flat, Thc().init(bucket), transport, step=0)
        return flat

    for flat in InProcessCluster(2).run(rank):
        assert flat[:64].isnan().all()
        assert flat[64:].isfinite().all()
