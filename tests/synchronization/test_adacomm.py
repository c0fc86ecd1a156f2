"""AdaComm against a plain loop with losses of its own; what happens without them; where it continues."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import laconic
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.errors import CommunicationError
from laconic.synchronization import AdaComm
from tests.least_squares import NAMES, LeastSquares, Values, each, gradient, mean

pytestmark = pytest.mark.timeout(60)
RATE, STEPS, WORKERS, PERIOD = 0.05, 40, 3, 8


def loss_of(step: int, rank: int) -> float:
    """Falls from about 4 to about 0.1; what is reported need not be what is trained."""
    return 4.0 * 0.9**step + 0.05 * rank


def published() -> tuple[list[list[Values]], list[int]]:
    """The replicas after every step, and the steps that end with a round."""
    x, seen, rounds, losses = each(WORKERS), [], [], []
    period, first, last = PERIOD, None, 0
    for step in range(STEPS):
        slopes = [gradient(values, step, rank) for rank, values in enumerate(x)]
        x = [{name: own[name] - RATE * slope[name] for name in NAMES} for own, slope in zip(x, slopes, strict=True)]
        losses += [loss_of(step, rank) for rank in range(WORKERS)]
        if step + 1 == last + period:
            x = [mean(x) for _ in x]
            loss = sum(losses) / len(losses)
            first = first or loss
            period, last, losses = min(PERIOD, math.ceil(math.sqrt(loss / first) * PERIOD)), step + 1, []
            rounds.append(step)
        seen.append(x)
    return seen, rounds


def on_every_rank(steps: range, saved: list[dict] | None = None) -> tuple[list, list[dict]]:
    """What each rank has after each step with the bytes it sent in it, and its state at the end."""
    models = [LeastSquares() for _ in range(WORKERS)]

    def one_rank(transport: InProcessTransport) -> tuple[list[tuple[Values, int]], dict]:
        model, found, rank = models[transport.rank], [], transport.rank
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        with laconic.attach(model, optimizer, f"adacomm(period={PERIOD})", transport=transport) as session:
            if saved is not None:
                model.load_state_dict(saved[rank]["model"])
                session.load_state_dict(saved[rank]["session"])
            for step in steps:
                before = session.traffic.sent_bytes("payload")
                rule, plan = session.strategy.synchronization, session.plan
                model(step, rank).backward()
                session.report_loss(torch.tensor(loss_of(step, rank)) if step % 2 else loss_of(step, rank))
                optimizer.step()
                optimizer.zero_grad()
                counted = session.traffic.sent_bytes("payload") - before
                moment = laconic.Moment(step, rank, WORKERS, rule.round_number(step))
                assert counted == (session.strategy.plan_bytes(plan, moment) if rule.due(step + 1) else 0)
                found.append(({name: value.detach().clone() for name, value in model.named_parameters()}, counted))
            state = {"session": session.state_dict(), "model": model.state_dict()}
        return found, state

    ranks = InProcessCluster(WORKERS).run(one_rank)
    return [found for found, _ in ranks], [state for _, state in ranks]


def test_the_published_rule() -> None:
    expected, rounds = published()
    gaps = [later - earlier for earlier, later in itertools.pairwise(rounds)]
    assert gaps[0] == PERIOD
    assert gaps[-1] < PERIOD / 2, "the period becomes shorter, or this shows nothing"
    found, _ = on_every_rank(range(STEPS))
    for rank, steps in enumerate(found):
        assert [step for step, (_, counted) in enumerate(steps) if counted] == rounds
        for step, (values, _) in enumerate(steps):
            for name in NAMES:
                torch.testing.assert_close(values[name].double(), expected[step][rank][name], rtol=1e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("middle", [5, PERIOD, 21])
def test_saved_and_loaded_training_continues_bit_for_bit(middle: int) -> None:
    """Before the first round, right after it, and between two: with the period, and with what was reported since."""
    whole, _ = on_every_rank(range(STEPS))
    _, saved = on_every_rank(range(middle))
    rest, _ = on_every_rank(range(middle, STEPS), saved)
    for before, after in zip(whole, rest, strict=True):
        for (wanted, sent), (values, counted) in zip(before[middle:], after, strict=True):
            assert sent == counted
            assert all(torch.equal(wanted[name], values[name]) for name in NAMES)


@pytest.mark.parametrize("silent", [(0, 1), (1,)])
def test_without_a_loss_it_raises_on_every_rank(silent: tuple[int, ...]) -> None:
    models = [LeastSquares() for _ in range(2)]

    def one_rank(transport: InProcessTransport) -> str:
        model = models[transport.rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        with laconic.attach(model, optimizer, "adacomm(period=3)", transport=transport) as session:
            try:
                for step in range(3):
                    loss = model(step, transport.rank)
                    loss.backward()
                    if transport.rank not in silent:
                        session.report_loss(loss)
                    optimizer.step()
            except CommunicationError as error:
                assert step == 2, "nothing is decided before the first round"
                return str(error)
        return ""

    who = "no rank has" if len(silent) == 2 else "rank 1 has not"
    for told in InProcessCluster(2).run(one_rank):
        assert f"adacomm decides by the loss when replicas average next, and {who} reported one" in told
        assert "session.report_loss(loss)" in told


def test_periods() -> None:
    def after(*losses: float) -> int:
        rule = AdaComm(period=10)
        for loss in losses:
            rule = rule.after_round(rule.timetable.last + rule.interval, loss)
        return rule.interval

    assert after(2.0) == 10
    assert after(2.0, 0.5) == 5
    assert after(2.0, 0.51) == 6, "rounded up"
    assert after(2.0, 8.0) == 10, "never longer than the first"
    assert after(2.0, 0.0) == 1
    assert after(2.0, 0.5, float("nan")) == 5, "what is not finite decides nothing"
    assert after(float("inf"), 2.0, 0.5) == 5, "nor is it the first loss"
    with pytest.raises(CommunicationError, match=r"must be > 0, got -1.*local_sgd"):
        after(-1.0)


def test_a_loss_is_one_number_and_goes_to_the_event_log() -> None:
    events, model = laconic.EventList(), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cluster = InProcessCluster(1)
    with laconic.attach(model, optimizer, "bsp", transport=cluster.transport(0), events=events) as session:
        with pytest.raises(CommunicationError, match=r"takes one number, got a tensor of shape \(2,\)"):
            session.report_loss(torch.ones(2))
        session.report_loss(torch.tensor([1.5], requires_grad=True))
    assert [event.data for event in events.events if event.kind == "loss"] == [{"loss": 1.5}]
