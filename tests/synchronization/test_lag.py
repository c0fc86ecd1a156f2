"""Lag against a plain loop, on gradients of whole data sets: which steps exchange, what is applied, what is sent."""

from __future__ import annotations

import pytest
import torch

import laconic
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.errors import IllegalCombination
from laconic.strategy import Strategy
from tests.least_squares import NAMES, LeastSquares, each, gradient, mean

pytestmark = pytest.mark.timeout(60)
STEPS, RATE, WORKERS = 40, 0.02, 3
ONE_BUCKET = "fusion(1GiB, first_bytes=1GiB)"


def published(threshold: float) -> tuple[list[dict[str, torch.Tensor]], list[bool]]:
    """The parameters after every step, and whether gradients were exchanged in it."""
    x = each(1)[0]
    sent = [dict.fromkeys(NAMES, torch.zeros(())) for _ in range(WORKERS)]
    applied = dict.fromkeys(NAMES, torch.zeros(()))
    seen, exchanged = [], []
    for _ in range(STEPS):
        slopes = [gradient(x, 0, rank) for rank in range(WORKERS)]
        bound = threshold * sum(float((value**2).sum()) for value in applied.values())
        changes = [
            sum(float(((slope[name] - old[name]) ** 2).sum()) for name in NAMES)
            for slope, old in zip(slopes, sent, strict=True)
        ]
        exchanged.append(max(changes) > bound)
        if exchanged[-1]:
            sent, applied = slopes, mean(slopes)
        x = {name: x[name] - RATE * applied[name] for name in NAMES}
        seen.append(x)
    return seen, exchanged


def trained(strategy: str) -> list[tuple[dict[str, torch.Tensor], int, int]]:
    """What rank 0 has after every step, the payload bytes it sent in it, and those that were predicted."""
    models = [LeastSquares() for _ in range(WORKERS)]

    def one_rank(transport: InProcessTransport) -> list[tuple[dict[str, torch.Tensor], int, int]]:
        model, found = models[transport.rank], []
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            for _ in range(STEPS):
                before = session.traffic.sent_bytes("payload")
                model(0, transport.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
                counted = session.traffic.sent_bytes("payload") - before
                values = {name: value.detach().double() for name, value in model.named_parameters()}
                found.append((values, counted, session.predicted_bytes_per_step()))
        return found

    ranks = InProcessCluster(WORKERS).run(one_rank)
    for others in ranks[1:]:
        for (mine, *_), (values, *_) in zip(ranks[0], others, strict=True):
            assert all(torch.equal(mine[name], values[name]) for name in NAMES), "replicas stay equal bit for bit"
    return ranks[0]


@pytest.mark.parametrize("threshold", [0.01, 0.25, 1.0])
def test_the_published_rule(threshold: float) -> None:
    expected, exchanged = published(threshold)
    assert 2 < sum(exchanged) < STEPS - 2, "some steps exchange and some do not, or this shows nothing"
    found = trained(f"lag(threshold={threshold}) / all_reduce / none / {ONE_BUCKET}")
    for step, ((values, counted, predicted), right) in enumerate(zip(found, expected, strict=True)):
        assert counted == (predicted if exchanged[step] else 0), f"step {step}"
        for name in NAMES:
            torch.testing.assert_close(values[name], right[name], rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_the_same_where_servers_form_sums_and_payloads_are_compressed() -> None:
    _, exchanged = published(0.25)
    for place in ("parameter_server / none", "all_reduce / bf16"):
        found = trained(f"lag / {place} / {ONE_BUCKET}")
        sent = [counted > 0 for _, counted, _ in found]
        assert sum(sent) < STEPS
        assert all(counted in (0, predicted) for _, counted, predicted in found)
        assert sent[0]
    assert sum(exchanged) < STEPS


def test_what_is_not_a_number_is_seen_by_all() -> None:
    models = [torch.nn.Linear(3, 1) for _ in range(2)]

    def one_rank(transport: InProcessTransport) -> list[bool]:
        model = models[transport.rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        finite: list[bool] = []
        with laconic.attach(model, optimizer, "lag", transport=transport):
            for step in range(4):
                inputs = torch.ones(1, 3) * (float("nan") if step == 2 and transport.rank == 1 else 1.0)
                optimizer.zero_grad()
                model(inputs).sum().backward()
                finite.append(all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None))
                optimizer.step()
        return finite

    assert InProcessCluster(2).run(one_rank) == [[True, True, False, True]] * 2


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("lag / all_reduce / none / dear", "lag / all_reduce / none / fusion"),
        ("lag / gossip", "lag / all_reduce / none / fusion"),
        ("lag / sharded", "bsp / sharded / none / fusion"),
        ("lag / all_reduce / signsgd", "lag / all_reduce / ef_signsgd / fusion"),
    ],
)
def test_refused(text: str, nearest: str) -> None:
    with pytest.raises(IllegalCombination, match=f'Nearest that works: "{nearest}"'):
        Strategy.parse(text)


def test_bytes_are_a_bound() -> None:
    assert not Strategy.parse("lag").exact()
    assert Strategy.parse("bsp").exact()
