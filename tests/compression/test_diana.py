"""diana: shifts that follow each worker's gradient, beside the paper's formulas."""

from __future__ import annotations

import pytest
import torch

from laconic.compression import Diana, ErrorFeedback, Int8, NoCompression, Qsgd, RandomK, TopK
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.errors import IllegalCombination
from laconic.strategy import Strategy
from tests.compression.test_laws import exchange, values

pytestmark = pytest.mark.timeout(60)
BUCKET = Bucket((TensorSpec("weight", (400,)),))


def test_formula() -> None:
    """Two ranks and three steps, with the inner compressor called by hand."""
    rate, inner = 0.25, Qsgd()

    def rank(transport: InProcessTransport) -> list[torch.Tensor]:
        compressor, found = Diana(inner, rate=rate), []
        state = compressor.init(BUCKET)
        for step in range(3):
            flat = values(transport.rank, step, 400, torch.float32)
            exchange(compressor, flat, state, transport, step=step)
            found.append(flat)
        return found

    found = InProcessCluster(2).run(rank)[0]
    shifts = [torch.zeros(400), torch.zeros(400)]
    for step in range(3):
        sent = []
        for rank_number in range(2):
            state = inner.init(BUCKET)
            state.moment = Moment(step, rank_number, 2, step)
            payload = inner.encode(values(rank_number, step, 400, torch.float32) - shifts[rank_number], state)
            sent.append(torch.empty(400))
            inner.decode(payload, sent[-1], state)
        assert torch.allclose(found[step], sum(shifts) + sum(sent), atol=1e-5)
        shifts = [shift + rate * one for shift, one in zip(shifts, sent, strict=True)]


def test_noise_goes_away_where_gradients_stay() -> None:
    """Workers whose gradients differ and add up to nothing: the noise of qsgd stays, under diana it vanishes."""
    opposite = torch.randn(400, generator=torch.Generator().manual_seed(0))

    def error(compressor: Qsgd | Diana) -> float:
        def rank(transport: InProcessTransport) -> float:
            state, flat = compressor.init(BUCKET), torch.zeros(400)
            for step in range(60):
                flat = opposite * (1 if transport.rank else -1)
                exchange(compressor, flat, state, transport, step=step)
            return float(flat.norm() / opposite.norm())

        return InProcessCluster(2).run(rank)[0]

    assert error(Qsgd()) > 0.1
    assert error(Diana(Qsgd())) < 1e-3


@pytest.mark.parametrize(
    ("compression", "reason"),
    [
        (Diana(TopK()), "unbiased compressor"),
        (Diana(Int8()), "unbiased compressor"),
        (Diana(ErrorFeedback(Qsgd())), "unbiased compressor"),
        (Diana(NoCompression()), "loses nothing"),
        (Diana(Qsgd(route="scatter")), "route has no effect"),
    ],
    ids=str,
)
def test_what_it_cannot_wrap(compression: Diana, reason: str) -> None:
    with pytest.raises(IllegalCombination, match=reason):
        Strategy(compression=compression)


def test_what_it_can_wrap() -> None:
    for inner in (Qsgd(levels=1), Int8(rounding="stochastic"), RandomK(scale=True)):
        Strategy(compression=Diana(inner))
    # Payloads are gathered, whatever sends fewer bytes.
    assert [round.kind for round in Diana(Qsgd()).rounds(BUCKET, Moment.steady(64))] == ["gather"]
