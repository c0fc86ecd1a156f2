"""adacomp: what reaches the maximum of its bin, beside the paper's rule in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from laconic.compression import AdaComp, ErrorFeedback
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.errors import IllegalCombination
from laconic.strategy import Strategy
from tests.compression.test_laws import exchange, values

pytestmark = pytest.mark.timeout(60)
BUCKET = Bucket((TensorSpec("weight", (13, 10)), TensorSpec("bias", (7,))))
BINS = (slice(0, 50), slice(50, 100), slice(100, 130), slice(130, 137))


def test_formula() -> None:
    def rank(transport: InProcessTransport) -> list[torch.Tensor]:
        method, found = AdaComp(bin=50), []
        state = method.init(BUCKET)
        for step in range(4):
            flat = values(transport.rank, step, BUCKET.numel, torch.float32)
            exchange(method, flat, state, transport, step=step)
            found.append(flat)
        return [*found, state.flat["adacomp.residual"]]

    *found, left = InProcessCluster(2).run(rank)[0]
    residuals = [np.zeros(BUCKET.numel, np.float32) for _ in range(2)]
    for step in range(4):
        expected = np.zeros(BUCKET.numel, np.float32)
        for number, residual in enumerate(residuals):
            dw = values(number, step, BUCKET.numel, torch.float32).numpy()
            residual += dw
            for place in BINS:
                sent = np.abs(residual[place] + dw[place]) >= np.abs(residual[place]).max()
                assert step or sent.any(), "in the first step the largest of each bin grows"
                expected[place] += np.where(sent, residual[place], 0)
                residual[place][sent] = 0
        assert np.array_equal(found[step].numpy(), expected)
    assert np.array_equal(left.numpy(), residuals[0])


def test_zeros_send_nothing_and_what_is_not_finite_is_seen_once() -> None:
    def rank(transport: InProcessTransport) -> list[torch.Tensor]:
        method = AdaComp(bin=50)
        state, found = method.init(BUCKET), []
        for step in range(3):
            flat = torch.zeros(BUCKET.numel)
            if step == 1:
                flat[3] = float("nan") if transport.rank else 1.0
            before = transport.traffic.sent_bytes()
            exchange(method, flat, state, transport, step=step)
            found.append(flat)
            assert step != 0 or transport.traffic.sent_bytes() - before == 4, "counts alone"
        return found

    for nothing, spoiled, after in InProcessCluster(2).run(rank):
        assert not nothing.any()
        assert spoiled[3].isnan()
        assert spoiled[50:].isfinite().all()
        assert not after.any()


def test_it_keeps_the_residual_itself() -> None:
    with pytest.raises(IllegalCombination, match="sends later itself"):
        Strategy(compression=ErrorFeedback(AdaComp()))
