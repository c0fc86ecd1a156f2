"""Places from the first, values as the second codes them: against numpy, and what does not fit together."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from laconic.architecture.all_reduce import Everyone, round_sent
from laconic.compression import Chain, Compressor, DctTopK, ErrorFeedback, Fp16, Int4, Int8, Qsgd, TopK
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.errors import IllegalCombination, InvalidSetting
from laconic.strategy import Strategy
from tests.compression.test_laws import exchange, values

BUCKET = Bucket((TensorSpec("weight", (70, 90)), TensorSpec("bias", (90,)), TensorSpec("scale", ())))
DENSITY = 0.1


def reference(flat: np.ndarray, largest: int, block: int) -> np.ndarray:
    """The k largest of each tensor, rounded to multiples of max / largest over blocks of them."""
    result = np.zeros_like(flat)
    for tensor, place in BUCKET.segments():
        tensor_values = flat[place]
        k = math.ceil(DENSITY * tensor.numel)
        places = np.sort(np.argsort(-np.abs(tensor_values), kind="stable")[:k])
        for start in range(0, k, block):
            chosen = places[start : start + block]
            unit = np.float32(np.abs(tensor_values[chosen]).max() / largest)
            result[place.start + chosen] = unit * np.round(tensor_values[chosen] / unit)
    return result


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("second", "largest", "block"), [(Int8(), 127, 256), (Int4(block=64), 7, 64)], ids=str)
def test_formula_with_error_feedback(second: Compressor, largest: int, block: int, world_size: int) -> None:
    compressor, steps = ErrorFeedback(Chain(TopK(density=DENSITY), second=second)), 4

    def one_rank(transport: InProcessTransport) -> list[np.ndarray]:
        state, found = compressor.init(BUCKET), []
        for step in range(steps):
            flat = values(transport.rank, step, BUCKET.numel, BUCKET.dtype)
            exchange(compressor, flat, state, transport, step=step)
            found.append(flat.numpy().copy())
        return found

    found = InProcessCluster(world_size).run(one_rank)
    error = [np.zeros(BUCKET.numel, np.float32) for _ in range(world_size)]
    for step in range(steps):
        total = np.zeros(BUCKET.numel, np.float32)
        for other in range(world_size):
            owed = values(other, step, BUCKET.numel, BUCKET.dtype).numpy() + error[other]
            sent = reference(owed, largest, block)
            error[other] = owed - sent
            total += sent
        for results in found:
            np.testing.assert_allclose(results[step], total, rtol=1e-5, atol=1e-6, err_msg=f"step {step}")


def test_bytes() -> None:
    first, second = TopK(density=DENSITY), Qsgd(levels=7, block=512)
    k = math.ceil(0.1 * 6300) + 9 + 1
    assert first.num_values(BUCKET) == k
    chained, plain = (method.rounds(BUCKET, Moment(0, 0, 4)) for method in (Chain(first, second=second), first))
    # Three blocks of at most 512 values with a float32 each; 4 bits a value, each block from a byte of its own on.
    coded = -(-(4 * 4 + 256 + (k - 10 - 512) // 2 + 5 + 1) // 4) * 4
    assert plain[0].sizes[0] - chained[0].sizes[0] == 4 * k - coded


@pytest.mark.parametrize("first", [TopK(density=0.1), TopK(density=0.1, route="scatter"), DctTopK()], ids=str)
@pytest.mark.parametrize("second", [Int8(), Qsgd(levels=3), TopK(density=0.5)], ids=str)
def test_replicas_agree_and_contributions_add_up(first: Compressor, second: Compressor) -> None:
    compressor = Chain(first, second=second)

    def one_rank(transport: InProcessTransport) -> tuple[torch.Tensor, torch.Tensor, int]:
        state = compressor.init(BUCKET)
        state.moment = Moment(0, transport.rank, transport.world_size)
        flat = values(transport.rank, 0, BUCKET.numel, BUCKET.dtype)
        own = torch.full_like(flat, 7.0)
        for work in compressor.exchange(flat, state, Everyone(transport, "a bucket"), own):
            work.wait()
        return flat, own, transport.traffic.sent_bytes()

    found = InProcessCluster(3).run(one_rank)
    predicted = sum(round_sent(round, 3) for round in compressor.rounds(BUCKET, Moment(0, 0, 3)))
    for flat, _, sent in found:
        assert torch.equal(flat, found[0][0])
        assert sent == predicted
    total = sum(own for _, own, _ in found)
    if compressor.inner.route == "gather":  # type: ignore[attr-defined]
        torch.testing.assert_close(total, found[0][0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("compression", "reason", "nearest"),
    [
        (
            "fp16 + chain",
            'chain does not fit around "fp16"; it wants a compressor that sends k entries of each tensor',
            "fp16",
        ),
        ("int8 + chain(second=qsgd) + error_feedback", "chain does not fit", "int8 + error_feedback"),
        (
            "topk + error_feedback + chain(second=int4)",
            'chain does not fit around "topk + error_feedback"',
            "topk + chain(second=int4) + error_feedback",
        ),
        (
            "topk + chain(second=fp16) + error_feedback",
            'chain cannot use "fp16" as second; it wants a compressor whose payload is packed bytes',
            "topk + chain + error_feedback",
        ),
        ("topk + chain + chain(second=int4)", "chain is applied twice", "topk + chain(second=int4)"),
    ],
)
def test_what_does_not_fit_is_refused(compression: str, reason: str, nearest: str) -> None:
    with pytest.raises(IllegalCombination) as caught:
        Strategy.parse(f"bsp / all_reduce / {compression} / wfbp")
    assert reason in str(caught.value)
    assert f'Nearest that works: "bsp / all_reduce / {nearest} / wfbp".' in str(caught.value)


def test_a_route_of_the_second_would_have_no_effect() -> None:
    with pytest.raises(InvalidSetting, match="route has no effect here"):
        Strategy.parse("bsp / all_reduce / topk + chain(int8(route=gather))")
    assert Strategy.parse("bsp / all_reduce / topk + chain(int8(route=auto))").compression == Chain(TopK())
    with pytest.raises(InvalidSetting, match=r"compression\.chain\.second must be a method"):
        Chain(TopK(), second="int8")  # type: ignore[arg-type]
    assert Chain(TopK(), second=Fp16()), "only a strategy knows the rules"
