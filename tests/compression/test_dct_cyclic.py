"""dct_cyclic: coefficients that one rank chooses for all, another rank in every round."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from laconic.architecture.all_reduce import round_sent
from laconic.compression import Chain, Compressor, DctCyclic, DctTopK, Int4, Int8, TwoBit
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from tests.compression.test_laws import exchange, values

pytestmark = pytest.mark.timeout(60)
BUCKET = Bucket((TensorSpec("weight", (20, 30)), TensorSpec("bias", (50,))))
CHUNKS = [*((number, 16 * number, 16 * number + 16) for number in range(37)), (37, 592, 600)]
CHUNKS += [(0, 600, 616), (1, 616, 632), (2, 632, 648), (3, 648, 650)]
"""The number of each chunk in its tensor, and where it begins and ends."""


def cosine(size: int) -> np.ndarray:
    rows = [[np.cos(np.pi * (2 * j + 1) * i / (2 * size)) for j in range(size)] for i in range(size)]
    matrix = np.sqrt(2 / size) * np.array(rows)
    matrix[0] /= np.sqrt(2)
    return matrix


def reference(inputs: list[np.ndarray], round: int) -> np.ndarray:
    """The sum of the coefficients that the leader of each chunk has chosen, without loss of precision."""
    found = np.zeros(BUCKET.numel)
    num_ranks = len(inputs)
    for number, start, stop in CHUNKS:
        matrix = cosine(stop - start)
        coefficients = [matrix @ one[start:stop] for one in inputs]
        leader = coefficients[(number + round) % num_ranks]
        chosen = np.argsort(-np.abs(leader))[: int(np.ceil(0.2 * (stop - start)))]
        kept = np.zeros(stop - start)
        kept[chosen] = sum(one[chosen] for one in coefficients)
        found[start:stop] = matrix.T @ kept
    return found


def inputs_of(world_size: int, step: int) -> list[np.ndarray]:
    return [values(rank, step, BUCKET.numel, BUCKET.dtype).numpy().astype(np.float64) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_formula(world_size: int) -> None:
    method = DctCyclic(density=0.2, chunk=16, values=Int8())

    def rank(transport: InProcessTransport) -> list[torch.Tensor]:
        found, state = [], method.init(BUCKET)
        for step in range(5):
            flat = values(transport.rank, step, BUCKET.numel, BUCKET.dtype)
            exchange(method, flat, state, transport, step=step)
            found.append(flat)
        return found

    every = InProcessCluster(world_size).run(rank)
    for step in range(5):
        expected = reference(inputs_of(world_size, step), step)
        for found in every:
            assert torch.equal(found[step], every[0][step])
            # int8 codes a value within a 254th of the largest in its block, twice at most.
            assert np.abs(found[step].numpy() - expected).max() < 0.02 * np.abs(expected).max()
        assert np.linalg.norm(every[0][step].numpy() - expected) < 0.01 * np.linalg.norm(expected)


@pytest.mark.parametrize("values_by", [Int8(), TwoBit()], ids=str)
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_contributions_add_up_to_the_result(values_by: Int8 | TwoBit, world_size: int) -> None:
    """Also where sums are coded again: their error is the contribution of the rank that has formed them."""
    method = DctCyclic(density=0.2, chunk=16, values=values_by)

    def rank(transport: InProcessTransport) -> tuple[torch.Tensor, torch.Tensor]:
        flat, own = values(transport.rank, 0, BUCKET.numel, BUCKET.dtype), torch.empty(BUCKET.numel)
        exchange(method, flat, method.init(BUCKET), transport, own=own)
        return flat, own

    found = InProcessCluster(world_size).run(rank)
    assert torch.allclose(sum(own for _, own in found), found[0][0], atol=1e-5)


def test_a_value_that_is_not_finite_reaches_all_ranks_whoever_leads() -> None:
    def rank(transport: InProcessTransport) -> list[bool]:
        method, found = DctCyclic(), []
        state = method.init(BUCKET)
        for step in range(3):
            flat = values(transport.rank, step, BUCKET.numel, BUCKET.dtype)
            if transport.rank == 1:
                flat[100] = torch.inf
            exchange(method, flat, state, transport, step=step)
            found.append(bool(flat[64:128].isfinite().any()))
        return found

    assert InProcessCluster(3).run(rank) == [[False] * 3] * 3


@pytest.mark.parametrize("world_size", [2, 4])
def test_momenta_of_demo_keep_what_was_not_applied(world_size: int) -> None:
    """After three steps, momenta and applied sums add up to all gradients; 4 ranks send sums back, 2 do not."""
    method = DctCyclic(density=0.2, chunk=16)

    def rank(transport: InProcessTransport) -> tuple[torch.Tensor, torch.Tensor]:
        state, applied = method.init(BUCKET), torch.zeros(BUCKET.numel)
        momentum = torch.zeros(BUCKET.numel)
        for step in range(3):
            flat, own = momentum + values(transport.rank, step, BUCKET.numel, BUCKET.dtype), torch.empty(BUCKET.numel)
            momentum = flat.clone()
            exchange(method, flat, state, transport, step=step, own=own)
            momentum -= own
            applied += flat
        return applied, momentum

    found = InProcessCluster(world_size).run(rank)
    put_in = sum(values(rank, step, BUCKET.numel, BUCKET.dtype) for rank in range(world_size) for step in range(3))
    assert torch.allclose(found[0][0] + sum(momentum for _, momentum in found), put_in, atol=1e-4)


def test_bytes_do_not_grow_with_ranks() -> None:
    bucket = Bucket((TensorSpec("weight", (1000, 640)),))

    def sent(method: Compressor, world_size: int) -> int:
        return sum(round_sent(round, world_size) for round in method.rounds(bucket, Moment.steady(world_size)))

    assert sent(DctCyclic(), 64) < 2.2 * sent(DctCyclic(), 2)
    assert sent(DctTopK(), 64) > 30 * sent(DctTopK(), 2)
    # On four ranks, three coefficients of each chunk cost what one coefficient of each rank costs.
    one_each = Chain(DctTopK(density=0.0156), second=Int4())
    assert sent(DctCyclic(), 4) == pytest.approx(sent(one_each, 4), rel=0.02)
    # Of 10,000 chunks on four ranks: two bytes to choose three coefficients, and 4 bits for each of them, twice; a
    # block of 512 has a scale of 4 bytes.
    chosen, coded = 2 * 10_000, 30_000 * (4 + 32 / 512) / 8
    assert sent(DctCyclic(), 4) == pytest.approx(3 / 4 * chosen + 3 / 2 * coded, rel=0.02)
