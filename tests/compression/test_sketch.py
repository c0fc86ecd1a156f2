"""sketch: the largest entries of a sum, found in a sum of count sketches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from laconic.compression import Sketch
from laconic.compression.kernels.reference.count_sketch import table
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from tests.compression.test_laws import exchange, values

pytestmark = pytest.mark.timeout(60)
BUCKET = Bucket((TensorSpec("weight", (4000,)), TensorSpec("bias", (1,))))


def exchanged(method: Sketch, world_size: int, gradient) -> torch.Tensor:
    def rank(transport: InProcessTransport) -> torch.Tensor:
        flat = gradient(transport.rank)
        exchange(method, flat, method.init(BUCKET), transport, step=3)
        return flat

    return InProcessCluster(world_size).run(rank)[0]


def mixed(rank: int) -> torch.Tensor:
    """Noise, and twenty entries that are large only in the sum."""
    flat = 0.01 * values(rank, 0, BUCKET.numel, torch.float32)
    flat[100:4000:200] += 1.0
    flat[7] += 10.0 if rank else -10.0  # large on each rank, and nothing in the sum
    return flat


def test_heavy_entries_of_the_sum_are_found_and_exact() -> None:
    found = exchanged(Sketch(density=0.005, width=0.1, rows=5), 2, mixed)
    true = mixed(0) + mixed(1)
    chosen = found.nonzero().view(-1)
    assert set(range(100, 4000, 200)) <= set(chosen.tolist())
    assert 7 not in chosen
    assert torch.equal(found[chosen], true[chosen])


def test_the_sketch_is_a_count_sketch() -> None:
    """Every value is in one cell of each row, with a sign; a single entry is therefore recovered exactly."""
    method = Sketch(width=0.05, rows=3)
    part = method._plan(BUCKET)[0]
    seeds = torch.tensor(part.seeds(99))
    cells, signs = table(seeds, 4000, part.columns)
    assert cells.shape == signs.shape == (3, 4000)
    assert {-1.0, 1.0} == set(signs.unique().tolist())
    for row in range(3):
        counts = np.bincount(cells[row] - row * 200, minlength=200)
        assert len(counts) == 200, "cells of a row stay in it"
        assert counts.max() < 20 + 8 * np.sqrt(20), "4000 values fall evenly into 200 cells"
    flat = torch.zeros(4000)
    flat[1234] = -2.5
    estimate = part.estimated(part.sketched(flat, seeds), seeds)
    assert estimate[1234] == -2.5
    # Elsewhere a median of three is not zero only where two rows collide.
    assert (estimate != 0).sum() < 4000 * 3 / 200**2 + 10


def test_small_tensors_are_summed_as_they_are_and_bytes_say_so() -> None:
    first, second = Sketch(width=0.05, rows=3).rounds(BUCKET, Moment.steady(2))
    assert first.sizes == (4 * (3 * 200 + 1),)
    assert second.sizes == (4 * (40 + 1),)


def test_what_is_not_finite_is_seen() -> None:
    def gradient(rank: int) -> torch.Tensor:
        flat = mixed(rank)
        flat[5] = float("inf") if rank else 0.0
        return flat

    assert not exchanged(Sketch(), 2, gradient).isfinite().all()
