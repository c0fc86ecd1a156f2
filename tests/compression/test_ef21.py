"""c_i = C(g_i - h_i), h_i += c_i, h += sum c_i: against numpy over several steps, and what it is for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from laconic import Strategy
from laconic.compression import Bf16, Compressor, Diana, Ef21, Fp16, Int4, Qsgd, TopK
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.errors import IllegalCombination
from tests.compression.test_cast import round_to_bf16, round_to_fp16
from tests.compression.test_laws import exchange, one_bucket, values

BUCKET = one_bucket(997, torch.float32)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("inner", "round_off"), [(Fp16(), round_to_fp16), (Bf16(), round_to_bf16)], ids=["fp16", "bf16"]
)
def test_formula(inner: Compressor, round_off, world_size: int) -> None:
    compressor, steps = Ef21(inner), 6

    def rank(transport: InProcessTransport) -> tuple[list[np.ndarray], list[np.ndarray]]:
        state = compressor.init(BUCKET)
        results, estimates = [], []
        for step in range(steps):
            flat = values(transport.rank, step, BUCKET.numel, BUCKET.dtype)
            exchange(compressor, flat, state, transport)
            results.append(flat.numpy().copy())
            estimates.append(state.by_parameter()["weight"]["ef21.own"].numpy().copy())
        return results, estimates

    found = InProcessCluster(world_size).run(rank)
    own = [np.zeros(BUCKET.numel, np.float32) for _ in range(world_size)]
    common = np.zeros(BUCKET.numel, np.float32)
    for step in range(steps):
        total = None
        for other in range(world_size):
            sent = round_off(values(other, step, BUCKET.numel, BUCKET.dtype).numpy() - own[other])
            own[other] = own[other] + sent
            total = sent if total is None else round_off(total + sent)
        common = common + total
        for other, (results, estimates) in enumerate(found):
            np.testing.assert_array_equal(estimates[step], own[other], f"estimate of rank {other}, step {step}")
            np.testing.assert_array_equal(results[step], common, f"result on rank {other}, step {step}")


@pytest.mark.parametrize("inner", [TopK(density=0.05), Int4(route="scatter"), Int4(route="gather")], ids=str)
def test_estimates_arrive_where_gradients_stay(inner: Compressor) -> None:
    """Gradients that no longer change are known to the last digit after a while, also where sums are sent back."""
    compressor, world_size, steps = Ef21(inner), 4, 60
    gradients = [values(rank, 0, BUCKET.numel, BUCKET.dtype) for rank in range(world_size)]

    def rank(transport: InProcessTransport) -> torch.Tensor:
        state = compressor.init(BUCKET)
        flat = torch.empty(BUCKET.numel)
        for _ in range(steps):
            flat = gradients[transport.rank].clone()
            exchange(compressor, flat, state, transport)
        return flat

    found = InProcessCluster(world_size).run(rank)
    assert all(torch.equal(flat, found[0]) for flat in found)
    assert torch.allclose(found[0], sum(gradients[1:], gradients[0]), atol=1e-4)


def test_the_gradient_is_never_missing() -> None:
    """Of a gradient that stays, error feedback gives nothing in most steps and a heap in some; an estimate stays."""
    bucket = one_bucket(100, torch.float32)
    transport = InProcessCluster(1).transport(0)
    compressor = Ef21(TopK(density=0.1))
    state, seen = compressor.init(bucket), []
    for _ in range(30):
        flat = torch.ones(100)
        exchange(compressor, flat, state, transport)
        seen.append(flat.clone())
    assert all(torch.equal(flat, torch.ones(100)) for flat in seen[10:])


def test_what_is_not_finite_is_seen_and_forgotten() -> None:
    bucket = one_bucket(3, torch.float32)
    transport = InProcessCluster(1).transport(0)
    compressor = Ef21(Bf16())
    state = compressor.init(bucket)
    for flat in (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, float("inf"), 3.0])):
        exchange(compressor, flat, state, transport)
    assert torch.isinf(flat[1])
    after = torch.tensor([1.0, 2.0, 3.0])
    exchange(compressor, after, state, transport)
    assert torch.equal(after, torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize(
    "text",
    [
        "bsp / all_reduce / none + ef21",
        "bsp / all_reduce / topk + error_feedback + ef21",
        "bsp / all_reduce / topk + ef21 + error_feedback",
        "bsp / all_reduce / topk + momentum_correction + ef21",
        "bsp / parameter_server / topk + ef21",
    ],
)
def test_refused(text: str) -> None:
    with pytest.raises(IllegalCombination):
        Strategy.parse(text)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compressor", [Ef21(TopK(density=0.2)), Ef21(Int4()), Diana(Qsgd())], ids=str)
def test_estimates_of_16_bit_gradients_do_not_drift(compressor: Compressor, dtype: torch.dtype) -> None:
    """Their roundings would add up over the steps, and nothing would ever correct the common estimate."""
    bucket = one_bucket(600, dtype)

    def rank(transport: InProcessTransport) -> dict[str, torch.Tensor]:
        state = compressor.init(bucket)
        for step in range(40):
            flat = values(transport.rank, step, bucket.numel, dtype)
            exchange(compressor, flat, state, transport, step=step)
            assert flat.dtype == dtype
        return {name.split(".")[1]: value.double() for name, value in state.flat.items()}

    replicas = InProcessCluster(3).run(rank)
    own = torch.stack([fields["own"] for fields in replicas]).sum(0)
    owed = torch.stack([fields.get("owed", torch.zeros(())) for fields in replicas]).sum(0)
    assert float((own - owed - replicas[0]["all"]).norm()) < 1e-5 * float(own.norm())


@pytest.mark.parametrize(
    ("text", "named", "nearest"),
    [
        ("bf16 + ef21", "bf16", "bf16"),
        (
            "fp16(rounding=stochastic) + per_layer + ef21",
            "fp16(rounding=stochastic)",
            "fp16(rounding=stochastic) + per_layer",
        ),
        ("topk + warmup(first=bf16) + ef21", "bf16", "topk + warmup + ef21"),
        ("qsgd + warmup(first=bf16) + diana", "bf16", "qsgd + warmup + diana"),
    ],
)
def test_sums_in_16_bits_are_refused(text: str, named: str, nearest: str) -> None:
    with pytest.raises(IllegalCombination) as caught:
        Strategy.parse(f"bsp / all_reduce / {text}")
    assert f'and "{named}" forms sums in 16 bits' in str(caught.value)
    assert str(caught.value).endswith(f'Nearest that works: "bsp / all_reduce / {nearest} / fusion".')
