"""dct_topk: c = D x in chunks, m = mask of the k largest |c| of each, decoded = D^T (m * c)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laconic.compression import DctTopK
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from tests.compression.test_laws import exchange, values
from tests.compression.test_topk import LAYERS


def cosine_transform(x: np.ndarray) -> np.ndarray:
    size = len(x)
    return np.array(
        [
            math.sqrt((1 if i == 0 else 2) / size)
            * sum(x[j] * math.cos(math.pi * (2 * j + 1) * i / (2 * size)) for j in range(size))
            for i in range(size)
        ]
    )


def transform_back(c: np.ndarray) -> np.ndarray:
    size = len(c)
    return np.array(
        [
            sum(
                math.sqrt((1 if i == 0 else 2) / size) * c[i] * math.cos(math.pi * (2 * j + 1) * i / (2 * size))
                for i in range(size)
            )
            for j in range(size)
        ]
    )


def by_hand(flat: np.ndarray, bucket: Bucket, chunk: int, density: float) -> np.ndarray:
    decoded = np.zeros(len(flat))
    for _, place in bucket.segments():
        for begin in range(place.start, place.stop, chunk):
            end = min(begin + chunk, place.stop)
            coefficients = cosine_transform(flat[begin:end].astype(np.float64))
            k = math.ceil(density * (end - begin))
            coefficients[np.argsort(-np.abs(coefficients), kind="stable")[k:]] = 0
            decoded[begin:end] = transform_back(coefficients)
    return decoded


@pytest.mark.parametrize("route", ["gather", "scatter"])
@pytest.mark.parametrize(("chunk", "density"), [(16, 0.2), (7, 0.01), (64, 1.0), (1, 0.5), (4096, 0.05)])
def test_formula(chunk: int, density: float, route: str) -> None:
    bucket = Bucket((TensorSpec("a", (11, 13)), TensorSpec("b", ()), TensorSpec("c", (3, 0)), TensorSpec("d", (80,))))
    compressor = DctTopK(chunk=chunk, density=density, route=route)
    flat = values(0, 0, bucket.numel, torch.float32)
    expected = by_hand(flat.numpy(), bucket, chunk, density)
    exchange(compressor, flat, compressor.init(bucket), InProcessCluster(1).transport(0))
    np.testing.assert_allclose(flat.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_the_sum_over_ranks() -> None:
    compressor = DctTopK(density=0.1, chunk=32)

    def rank(transport: InProcessTransport) -> np.ndarray:
        flat = values(transport.rank, 0, LAYERS.numel, torch.float32)
        exchange(compressor, flat, compressor.init(LAYERS), transport)
        return flat.numpy()

    expected = sum(
        by_hand(values(other, 0, LAYERS.numel, torch.float32).numpy(), LAYERS, 32, 0.1) for other in range(3)
    )
    for found in InProcessCluster(3).run(rank):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_everything_is_lossless_but_for_rounding() -> None:
    compressor = DctTopK(density=1.0)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-6), (torch.bfloat16, 1e-2)):
        bucket = Bucket((TensorSpec("w", (1000,), dtype),))
        flat = values(0, 0, 1000, dtype)
        exchange(compressor, flat, compressor.init(bucket), InProcessCluster(1).transport(0))
        torch.testing.assert_close(flat, values(0, 0, 1000, dtype), rtol=tolerance, atol=tolerance)


def test_smooth_values_need_few_coefficients() -> None:
    compressor = DctTopK(density=0.05)
    flat = torch.sin(torch.arange(640) / 40)
    before = flat.clone()
    exchange(compressor, flat, compressor.init(Bucket((TensorSpec("w", (640,)),))), InProcessCluster(1).transport(0))
    assert float((flat - before).norm() / before.norm()) < 0.05


def test_bytes_by_hand() -> None:
    bucket = Bucket((TensorSpec("w", (640,)), TensorSpec("b", (10,))))
    # 4 of 64 in ten chunks, 1 of 10 in the last: 41 of 650.
    compressor = DctTopK(density=0.05, indices="int16")
    assert compressor.num_values(bucket) == 41
    assert compressor.packed_bytes(bucket) == 84 + 41 * 4


def test_a_place_takes_as_many_bits_as_its_chunk_needs() -> None:
    bucket = Bucket((TensorSpec("w", (6400,)), TensorSpec("b", (10,))))
    # 2 of 64 in a hundred chunks, 1 of 10 in the last: 201 places of 6 bits are 151 bytes, and 152 a multiple of four.
    assert DctTopK(density=1 / 32).indices_bytes(bucket) == 152
    # Side by side and the rest in unary: 5 bits, and 201 + 200 bits for all.
    assert DctTopK(density=1 / 32, indices="packed").indices_bytes(bucket) == 180


@given(
    st.lists(st.integers(1, 700), min_size=1, max_size=4),
    st.integers(1, 300),
    st.sampled_from([0.002, 0.01, 1 / 64, 1 / 32, 0.05, 0.3, 1.0]),
    st.integers(0, 2**31),
)
def test_places_of_any_chunks_come_back(sizes: list[int], chunk: int, density: float, seed: int) -> None:
    bucket = Bucket(tuple(TensorSpec(f"w{number}", (size,)) for number, size in enumerate(sizes)))
    compressor = DctTopK(density=density, chunk=chunk)
    flat = torch.randn(bucket.numel, generator=torch.Generator().manual_seed(seed))
    state = compressor.init(bucket)
    places, _ = compressor.selected(flat, state)
    packed = compressor.pack_indices(places, bucket)
    assert packed.numel() == compressor.indices_bytes(bucket)
    assert packed.numel() <= DctTopK(density=density, chunk=chunk, indices="packed").indices_bytes(bucket)
    assert torch.equal(compressor.unpack_indices(packed, bucket), places)
