"""topk: m = mask of the k largest |g| of each tensor, decoded = m * g; and what all sparsifiers share."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from laconic.architecture.all_reduce import round_sent
from laconic.compression import (
    Compressor,
    DctTopK,
    Dgc,
    ErrorFeedback,
    GTopK,
    OkTopK,
    Packed,
    Sidco,
    Threshold,
    TopK,
)
from laconic.compression.families.sparsifier import Sparsifier
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.errors import InvalidSetting
from laconic.strategy import Strategy
from tests.compression.test_laws import exchange, values

LAYERS = Bucket(
    (
        TensorSpec("a.weight", (37, 41)),
        TensorSpec("a.bias", ()),
        TensorSpec("nothing", (0, 3)),
        TensorSpec("b.weight", (2003,)),
    )
)


def largest(flat: np.ndarray, bucket: Bucket, density: float) -> np.ndarray:
    """The k largest magnitudes of each tensor, zeros elsewhere."""
    decoded = np.zeros_like(flat)
    for _, place in bucket.segments():
        part = flat[place]
        k = math.ceil(density * len(part))
        chosen = np.lexsort((np.arange(len(part)), -np.abs(part)))[:k]
        decoded[place][chosen] = part[chosen]
    return decoded


@pytest.mark.parametrize("indices", ["auto", "int32", "int16", "bitmap", "packed"])
@pytest.mark.parametrize("density", [1e-9, 0.01, 0.25, 1.0])
def test_formula(density: float, indices: str) -> None:
    compressor = TopK(density=density, indices=indices)
    state = compressor.init(LAYERS)
    flat = values(0, 0, LAYERS.numel, torch.float32)
    packed = compressor.pack(flat, state)
    out = torch.full((LAYERS.numel,), 7.0)
    compressor.unpack(packed, out, state)
    np.testing.assert_array_equal(out.numpy(), largest(flat.numpy(), LAYERS, density))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_sum_over_ranks(world_size: int) -> None:
    compressor = TopK(density=0.05)

    def rank(transport: InProcessTransport) -> np.ndarray:
        flat = values(transport.rank, 0, LAYERS.numel, torch.float32)
        exchange(compressor, flat, compressor.init(LAYERS), transport)
        return flat.numpy()

    total = np.zeros(LAYERS.numel, np.float32)
    for other in range(world_size):
        total += largest(values(other, 0, LAYERS.numel, torch.float32).numpy(), LAYERS, 0.05)
    for found in InProcessCluster(world_size).run(rank):
        np.testing.assert_array_equal(found, total)


def test_by_shards_it_selects_again_from_the_sums() -> None:
    compressor = TopK(density=0.05, route="scatter")
    bucket = Bucket((TensorSpec("w", (1024,)),))

    def rank(transport: InProcessTransport) -> np.ndarray:
        flat = values(transport.rank, 0, 1024, torch.float32)
        exchange(compressor, flat, compressor.init(bucket), transport)
        return flat.numpy()

    halves = Bucket((TensorSpec("first", (512,)), TensorSpec("second", (512,))))
    total = sum(largest(values(other, 0, 1024, torch.float32).numpy(), halves, 0.05) for other in range(2))
    for found in InProcessCluster(2).run(rank):
        np.testing.assert_array_equal(found, largest(np.asarray(total), halves, 0.05))


def test_bytes_by_hand() -> None:
    # 16 of 1517, 1 of 1 and 21 of 2003: 38 of 3521 entries.
    assert TopK(indices="int32").packed_bytes(LAYERS) == 38 * 8
    assert TopK(indices="int16").packed_bytes(LAYERS) == 38 * 6
    assert TopK(indices="bitmap").packed_bytes(LAYERS) == 38 * 4 + 444
    # 6 low bits each (29 bytes), 38 + 55 bits in unary (12 bytes), up to a multiple of 4.
    assert TopK().packed_bytes(LAYERS) == 38 * 4 + 44
    assert TopK(density=1.0).packed_bytes(LAYERS) == 4 * LAYERS.numel, "all entries need no places"


@pytest.mark.parametrize("density", [0, 0.0, -0.1, 1.01, math.inf, math.nan])
@pytest.mark.parametrize("method", [TopK, Sidco, DctTopK, GTopK, OkTopK, Dgc])
def test_densities_that_make_no_sense_are_refused(method: type[Compressor], density: float) -> None:
    with pytest.raises(InvalidSetting, match=r"density must be a number > 0 and <= 1"):
        method(density=density)


def test_the_first_setting_is_the_density() -> None:
    found = Strategy.parse("bsp / all_reduce / topk(2%, indices=bitmap)").compression
    assert found == TopK(density=0.02, indices="bitmap")
    assert str(found) == "topk(density=0.02, indices=bitmap)"


FINITE_LOSS = [
    TopK(),
    TopK(route="scatter"),
    Sidco(),
    Threshold(tau=10.0),
    GTopK(),
    OkTopK(),
    Dgc(),
    DctTopK(),
    Dgc(clip_norm=1.0),
]


@pytest.mark.parametrize("compressor", FINITE_LOSS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_arrives(compressor: Compressor, bad: float) -> None:
    """Everyone must see that a step went wrong; with error feedback too, and only once."""
    bucket = Bucket((TensorSpec("w", (5000,)), TensorSpec("b", (3,))))
    stacks = [compressor] if compressor.traits.keeps_residual else [compressor, ErrorFeedback(compressor)]
    for stack in stacks:

        def rank(transport: InProcessTransport, stack: Compressor = stack) -> list[torch.Tensor]:
            state, results = stack.init(bucket), []
            for step in range(2):
                flat = values(transport.rank, step, bucket.numel, torch.float32)
                if transport.rank == 1 and step == 0:
                    flat[4321] = bad
                exchange(stack, flat, state, transport, step=step)
                results.append(flat)
            return results

        first, second = InProcessCluster(3).run(rank)[2]
        if not isinstance(compressor, DctTopK):  # whose chunk becomes NaN as a whole
            assert first[4321] == bad or (math.isnan(bad) and first[4321].isnan())
            assert int((~first.isfinite()).sum()) == 1
        else:
            assert not first[4321].isfinite()
        assert bool(second.isfinite().all())


@pytest.mark.parametrize("compressor", [TopK(density=0.1), Sidco(density=0.1), DctTopK(density=0.1)], ids=str)
def test_another_compressor_can_code_the_values(compressor: Sparsifier) -> None:
    """What a chain of two methods uses gives what the method itself gives."""
    state = compressor.init(LAYERS)
    flat = values(0, 0, LAYERS.numel, torch.float32)
    indices, chosen = compressor.select(flat, state)
    assert indices.numel() == chosen.numel() == compressor.num_values(LAYERS)
    coded = compressor.pack_indices(indices, LAYERS)
    assert coded.numel() == compressor.indices_bytes(LAYERS)
    assert torch.equal(compressor.unpack_indices(coded, LAYERS), indices)

    bucket = compressor.values_bucket(LAYERS)
    assert bucket.numel == compressor.num_values(LAYERS)
    assert [tensor.name for tensor in bucket.tensors] == [tensor.name for tensor in LAYERS.tensors]
    for (_, whole), (_, part) in zip(LAYERS.segments(), bucket.segments(), strict=True):
        assert bool(((indices[part] >= whole.start) & (indices[part] < whole.stop)).all()), "values stay with a tensor"

    placed, unpacked = torch.full((2, LAYERS.numel), 7.0)
    compressor.place(indices, chosen, placed, state)
    compressor.unpack(compressor.pack(flat, state), unpacked, state)
    assert torch.equal(placed, unpacked)


def test_values_travel_as_float32() -> None:
    bucket = Bucket((TensorSpec("w", (4,), torch.float64),))
    compressor = TopK(density=0.5)
    state, out = compressor.init(bucket), torch.empty(4, dtype=torch.float64)
    compressor.unpack(compressor.pack(torch.tensor([1e300, 1 / 3, 0.1, 0.1], dtype=torch.float64), state), out, state)
    assert out.tolist() == [math.inf, float(np.float32(1 / 3)), 0.0, 0.0]


def test_few_bytes_meet_by_gather_unless_told_otherwise() -> None:
    bucket = Bucket((TensorSpec("w", (100_000,)),))
    for method in (TopK, Sidco, DctTopK):
        assert isinstance(method(), Packed)
        assert [round.kind for round in method().rounds(bucket, Moment.steady(16))] == ["gather"]
        kinds = [round.kind for round in method(route="scatter").rounds(bucket, Moment.steady(16))]
        assert kinds == ["scatter", "gather"]
    gather = sum(round_sent(round, 16) for round in TopK().rounds(bucket, Moment.steady(16)))
    scatter = sum(round_sent(round, 16) for round in TopK(route="scatter").rounds(bucket, Moment.steady(16)))
    assert scatter < gather / 6
