"""randomk: the same k places drawn from (step, parameter) on every rank, decoded = m * g."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from laconic.compression import RandomK
from laconic.compression.wire.seeds import base_seed, mix, moment_seed
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from tests.compression.test_laws import exchange, values
from tests.compression.test_topk import LAYERS


def drawn(name: str, numel: int, density: float, step: int) -> list[int]:
    """The places of one tensor, one at a time."""
    k = math.ceil(density * numel)
    seed = mix(base_seed(name, 0) ^ moment_seed(Moment(step), shared=True))
    shift = mix(seed) * numel >> 32
    places = []
    for i in range(k):
        begin, end = i * numel // k, (i + 1) * numel // k
        places.append((begin + (mix(i + seed) * (end - begin) >> 32) + shift) % numel)
    return places


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("density", [1e-9, 0.01, 0.3, 1.0])
def test_formula(density: float, scale: bool) -> None:
    compressor = RandomK(density=density, scale=scale)

    def rank(transport: InProcessTransport) -> list[np.ndarray]:
        state, results = compressor.init(LAYERS), []
        for step in range(3):
            flat = values(transport.rank, step, LAYERS.numel, torch.float32)
            exchange(compressor, flat, state, transport, step=step)
            results.append(flat.numpy())
        return results

    found = InProcessCluster(2).run(rank)
    for step in range(3):
        expected = np.zeros(LAYERS.numel, np.float32)
        for tensor, place in LAYERS.segments():
            if tensor.numel:
                places = drawn(tensor.name, tensor.numel, density, step)
                assert len(set(places)) == len(places) == math.ceil(density * tensor.numel)
                factor = np.float32(tensor.numel / len(places) if scale else 1.0)
                for other in range(2):
                    mine = values(other, step, LAYERS.numel, torch.float32).numpy()[place]
                    expected[place][places] += mine[places] * factor
        for results in found:
            np.testing.assert_array_equal(results[step], expected)


def test_only_values_travel() -> None:
    for dtype, itemsize in ((torch.float32, 4), (torch.bfloat16, 2), (torch.float64, 8)):
        bucket = Bucket((TensorSpec("a", (1517,), dtype), TensorSpec("b", (1,), dtype)))
        (round,) = RandomK().rounds(bucket, Moment.steady(4))
        assert (round.kind, round.sizes) == ("sum", (17 * itemsize,))


def test_every_place_has_the_same_chance() -> None:
    """Also where k does not divide the number of entries: 40 draws a place, give or take four standard deviations."""
    numel, density, steps = 101, 0.07, 500
    counts = np.zeros(numel)
    compressor = RandomK(density=density)
    bucket = Bucket((TensorSpec("w", (numel,)),))
    state = compressor.init(bucket)
    for step in range(steps):
        state.moment = Moment(step)
        out = torch.empty(numel)
        compressor.decode(compressor.encode(torch.ones(numel), state), out, state)
        counts += out.numpy()
    expected = steps * math.ceil(density * numel) / numel
    assert counts.sum() == steps * 8
    assert np.abs(counts - expected).max() < 4.5 * math.sqrt(expected)


def test_scaled_it_is_right_on_average() -> None:
    compressor = RandomK(density=0.25, scale=True)
    bucket = Bucket((TensorSpec("w", (64,)),))
    state, total = compressor.init(bucket), torch.zeros(64)
    flat = values(0, 0, 64, torch.float32)
    for step in range(600):
        state.moment = Moment(step)
        out = torch.empty(64)
        compressor.decode(compressor.encode(flat, state), out, state)
        total += out
    torch.testing.assert_close(total / 600, flat, rtol=0.4, atol=0.0)


def test_steps_and_parameters_draw_apart() -> None:
    tensors = [drawn(name, 10_000, 0.01, step) for name in ("a", "b") for step in (0, 1)]
    for index, first in enumerate(tensors):
        for second in tensors[index + 1 :]:
            assert len(set(first) & set(second)) < 10, "about one in a hundred by chance"
