"""atomo: singular triples drawn with p_i = min(1, c s_i), enlarged by 1 / p_i."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from laconic.compression import Atomo
from laconic.compression.atomo import probabilities
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.errors import IllegalCombination
from laconic.strategy import Strategy
from tests.compression.test_laws import exchange, values

pytestmark = pytest.mark.timeout(60)
BUCKET = Bucket((TensorSpec("weight", (12, 20)), TensorSpec("bias", (7,))))


def by_bisection(singular: np.ndarray, total: int) -> np.ndarray:
    """min(1, c s) whose sum is `total`, with c found by halving an interval."""
    low, high = 0.0, 1e9
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(1, middle * singular).sum() < total else (low, middle)
    return np.minimum(1, high * singular)


@pytest.mark.parametrize("total", [1, 2, 5])
@pytest.mark.parametrize("decay", [0.0, 0.3, 2.0])
def test_probabilities(total: int, decay: float) -> None:
    singular = np.exp(-decay * np.arange(9))
    found = probabilities(torch.from_numpy(singular), total).numpy()
    np.testing.assert_allclose(found, by_bisection(singular, total), rtol=1e-6)
    np.testing.assert_allclose(found.sum(), total, rtol=1e-9)


def decoded(compressor: Atomo, flat: torch.Tensor, step: int) -> torch.Tensor:
    bucket = Bucket(tuple(dataclasses.replace(tensor, dtype=flat.dtype) for tensor in BUCKET.tensors))
    state, out = compressor.init(bucket), torch.empty_like(flat)
    state.moment = Moment(step)
    compressor.decode(compressor.encode(flat, state), out, state)
    return out


def test_what_is_drawn_are_singular_triples_divided_by_their_probability() -> None:
    compressor, flat = Atomo(rank=3), values(0, 0, BUCKET.numel, torch.float64)
    u, s, vt = np.linalg.svd(flat[:240].view(12, 20).numpy())
    weights = s / by_bisection(s, 3)
    for step in range(20):
        out = decoded(compressor, flat, step)
        # In the basis of singular vectors only the diagonal is left, with three entries.
        inside = u.T @ out[:240].view(12, 20).numpy() @ vt.T
        drawn = np.flatnonzero(np.abs(np.diag(inside)) > 1e-9)
        assert len(drawn) == 3
        np.testing.assert_allclose(np.diag(inside)[drawn], weights[drawn], rtol=1e-6)
        assert np.abs(inside - np.pad(np.diag(np.diag(inside)), ((0, 0), (0, 8)))).max() < 1e-9
        assert torch.equal(out[240:], flat[240:]), "vectors travel as they are"


def test_right_on_average() -> None:
    compressor, flat = Atomo(rank=2), values(1, 0, BUCKET.numel, torch.float32)
    draws = 1500
    mean = torch.stack([decoded(compressor, flat, step) for step in range(draws)]).double().mean(0)
    noise = sum(float((decoded(compressor, flat, step) - flat).square().sum()) for step in range(100)) / 100
    assert float((mean - flat).square().sum()) < 3 * noise / draws


def test_one_round_of_two_thin_matrices() -> None:
    rounds = Atomo(rank=3).rounds(BUCKET, Moment.steady(4))
    assert [(round.kind, round.sizes) for round in rounds] == [("gather", (4 * (3 * (12 + 20) + 7),))]


@pytest.mark.parametrize("rank", [1, 4])
def test_zeros_low_rank_and_infinity(rank: int) -> None:
    compressor, flat = Atomo(rank=rank), torch.zeros(BUCKET.numel)
    assert not decoded(compressor, flat, 0).any()
    flat[:240] = torch.outer(torch.arange(12.0), torch.ones(20)).view(-1)
    assert torch.allclose(decoded(compressor, flat, 0), flat, atol=1e-4), "one triple, always drawn"
    flat[5] = float("inf")

    def alone(transport: InProcessTransport) -> torch.Tensor:
        exchange(compressor, flat, compressor.init(BUCKET), transport)
        return flat

    assert InProcessCluster(1).run(alone)[0][:240].isnan().all()


def test_no_residual_of_what_is_enlarged() -> None:
    with pytest.raises(IllegalCombination, match="would grow"):
        Strategy.parse("bsp / all_reduce / atomo + error_feedback")
