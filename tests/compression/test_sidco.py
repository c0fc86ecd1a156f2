"""sidco: a threshold from exponentials fitted to what exceeds the one before; exactly k entries whatever it says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from laconic.compression import Sidco
from laconic.compression.kernels.reference.approximate_topk import sample_places
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from tests.compression.test_laws import bits, values

NUMEL = 50_000


def fitted(magnitudes: np.ndarray, k: int) -> tuple[float, float]:
    """The last threshold that clearly more than are wanted pass in the sample, and the last of all."""
    left = magnitudes[sample_places(len(magnitudes), torch.device("cpu")).numpy()].astype(np.float64)
    wanted = k * len(left) / len(magnitudes)
    fill = threshold = 0.0
    while len(left) > wanted:
        share = max(0.25, wanted / len(left))
        threshold += (left.mean() - threshold) * math.log(1 / share)
        left = left[left > threshold]
        if len(left) > wanted + 4 * math.sqrt(wanted) + 8:
            fill = threshold
        if share > 0.25:
            break
    return fill, threshold


def selected(flat: torch.Tensor, density: float, step: int = 0) -> np.ndarray:
    bucket = Bucket((TensorSpec("w", (flat.numel(),)),))
    compressor = Sidco(density=density)
    state = compressor.init(bucket)
    state.moment = Moment(step)
    indices, chosen = compressor.select(flat, state)
    assert bits(chosen) == bits(flat[indices])
    assert indices.numel() == math.ceil(density * flat.numel())
    assert bool((indices[1:] > indices[:-1]).all())
    return indices.numpy()


def gradients() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(NUMEL, generator=generator)
    return {
        "normal": normal,
        "Laplace": normal.sign() * -torch.rand(NUMEL, generator=generator).log(),
        "Student": normal / torch.randn(3, NUMEL, generator=generator).square().mean(0).sqrt(),
        "mixed": values(0, 0, NUMEL, torch.float32),
    }


@pytest.mark.parametrize("kind", gradients())
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.4])
def test_formula(kind: str, density: float) -> None:
    flat = gradients()[kind]
    magnitudes = flat.abs().numpy()
    k = math.ceil(density * NUMEL)
    fill, threshold = fitted(magnitudes, k)
    passed = int((magnitudes > threshold).sum())
    # The fewer are wanted, the more chance has to do with how many pass.
    assert (0.7 * k < passed < 1.4 * k) or density in (0.001, 0.4), "the fit is good enough to be of use"
    assert int((magnitudes > fill).sum()) >= k
    found = magnitudes[selected(flat, density)]
    if passed >= k:
        assert found.min() > threshold * (1 - 1e-6)
    else:
        assert int((found > threshold).sum()) == pytest.approx(passed, abs=1)
        assert found.min() > fill * (1 - 1e-6)
    exact = np.sort(magnitudes)[-k:]
    assert (found**2).sum() > 0.8 * (exact**2).sum()


def test_of_too_many_all_have_their_turn() -> None:
    """Which ones are left out changes from step to step."""
    flat = gradients()["normal"]
    threshold = fitted(flat.abs().numpy(), 500)[1]
    passed = set(np.flatnonzero(flat.abs().numpy() > threshold).tolist())
    assert len(passed) > 500
    left_out = [passed - set(selected(flat, 0.01, step).tolist()) for step in range(20)]
    assert all(left_out)
    assert not set.intersection(*left_out)


@pytest.mark.parametrize(
    "flat",
    [
        torch.zeros(20_000),
        torch.full((20_000,), -3.0),
        torch.cat((torch.ones(3), torch.zeros(19_997))),
        torch.full((20_000,), 3e38),
        torch.cat((torch.tensor([float("nan")]), torch.randn(19_999))),
        torch.randn(16_384),
        torch.randn(50),
        torch.empty(0),
    ],
    ids=["zeros", "equal", "three", "huge", "NaN", "just enough", "few", "none"],
)
@pytest.mark.parametrize("density", [0.01, 0.5, 1.0])
def test_whatever_the_values_are_k_are_sent(flat: torch.Tensor, density: float) -> None:
    found = selected(flat, density)
    if flat.numel() and flat[0].isnan():
        assert found[0] == 0
    if int((flat != 0).sum()) == 3:
        assert found[:3].tolist() == [0, 1, 2]
