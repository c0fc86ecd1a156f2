"""Rounds that end by time: ranks of unequal speed, on clocks that are moved, against plain loops over plain tensors."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

import laconic
from laconic.core.clock import VirtualClock
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.errors import IllegalCombination, UsageError
from laconic.simulator import simulate
from laconic.strategy import Strategy
from laconic.workload import workload
from tests.least_squares import NAMES, LeastSquares, Values, assert_close, each, gradient, start
from tests.simulator.jobs import hosts

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore::laconic.errors.LaconicWarning")]
STEP_S = (1.0, 1.7, 4.1)
"""Seconds that a step takes on each rank."""
SECONDS, PERIOD, ROUNDS, RATE = 5.0, 8, 4, 0.03
STEPS = [5, 3, 2]
"""That reach the deadline on each rank: 5.0, 5.1 and 8.2 s."""


def trained(
    strategy: str, *, rounds: int = ROUNDS, saved: list | None = None, step_s: tuple[float, ...] = STEP_S
) -> tuple[list[list[Values]], list[list[int]], list[list[int]], list]:
    """Parameters, steps made and payload bytes of every rank after every round, and what could be saved then."""
    models = [LeastSquares() for _ in step_s]

    def one_rank(transport: InProcessTransport) -> tuple:
        rank, clock = transport.rank, VirtualClock()
        model = models[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        found, made, sent = [], [], []
        with laconic.attach(model, optimizer, strategy, transport=transport, clock=clock) as session:
            number = 0
            if saved is not None:
                model.load_state_dict(saved[rank]["model"])
                session.load_state_dict(saved[rank]["session"])
                number = saved[rank]["number"]
            end = session.step + rounds * PERIOD
            began, before = number, session.traffic.sent_bytes("payload")
            while session.step < end:
                model(number, rank).backward()
                clock.advance_to(clock.now() + step_s[rank])
                optimizer.step()
                optimizer.zero_grad()
                number += 1
                if session.step % PERIOD == 0:
                    found.append({name: value.detach().clone() for name, value in model.named_parameters()})
                    made.append(number - began)
                    sent.append(session.traffic.sent_bytes("payload") - before)
                    began, before = number, session.traffic.sent_bytes("payload")
            kept = {"model": copy.deepcopy(model.state_dict()), "session": session.state_dict(), "number": number}
        return found, made, sent, kept

    found, made, sent, kept = zip(*InProcessCluster(len(step_s)).run(one_rank), strict=True)
    return [list(row) for row in zip(*found, strict=True)], list(made), list(sent), list(kept)


def by_hand(outer, *, steps: list[int], rounds: int = ROUNDS) -> list[list[Values]]:
    """Every replica makes its own number of steps; then `outer` is given the mean change, weighted by those."""
    x, old, number, expected = each(len(steps)), start(), [0] * len(steps), []
    for _ in range(rounds):
        for rank, count in enumerate(steps):
            for _ in range(count):
                slope = gradient(x[rank], number[rank], rank)
                x[rank] = {name: x[rank][name] - RATE * slope[name] for name in NAMES}
                number[rank] += 1
        change = {
            name: sum(count * (old[name] - x[rank][name]) for rank, count in enumerate(steps)) / sum(steps)
            for name in NAMES
        }
        old = outer(old, change)
        x = [copy.deepcopy(old) for _ in steps]
        expected.append(copy.deepcopy(x))
    return expected


def test_local_sgd_takes_the_mean_weighted_by_steps() -> None:
    found, made, _, _ = trained(f"local_sgd(period={PERIOD}, seconds={SECONDS}s)")
    assert made == [[count] * ROUNDS for count in STEPS]
    assert_close(found, by_hand(lambda old, d: {name: old[name] - d[name] for name in NAMES}, steps=STEPS))


def test_diloco_steps_along_it() -> None:
    u = {name: torch.zeros_like(value) for name, value in start().items()}

    def nesterov(old: Values, d: Values) -> Values:
        for name in NAMES:
            u[name] = 0.6 * u[name] + d[name]
        return {name: old[name] - 0.5 * (d[name] + 0.6 * u[name]) for name in NAMES}

    found, _, _, _ = trained(f"diloco(period={PERIOD}, seconds={SECONDS}s, lr=0.5, momentum=0.6)")
    assert_close(found, by_hand(nesterov, steps=STEPS))


def test_a_fast_rank_stops_after_the_period() -> None:
    found, made, _, _ = trained(f"local_sgd(period={PERIOD}, seconds=20s)", step_s=(1.0, 6.0), rounds=2)
    assert made == [[8, 8], [4, 4]]
    plain = by_hand(lambda old, d: {name: old[name] - d[name] for name in NAMES}, steps=[8, 4], rounds=2)
    assert_close(found, plain)


@pytest.mark.parametrize("rest", ["none", "int8 + error_feedback", "randomk(density=0.5) + error_feedback"])
def test_a_deadline_that_never_comes_changes_no_bit(rest: str) -> None:
    timed = trained(f"diloco(period={PERIOD}, seconds=1h) / all_reduce / {rest}")[0]
    plain = trained(f"diloco(period={PERIOD}) / all_reduce / {rest}")[0]
    for one, other in zip(itertools.chain(*timed), itertools.chain(*plain), strict=True):
        for name in NAMES:
            assert torch.equal(one[name], other[name])


@pytest.mark.parametrize("rest", ["none", "int8", "randomk(density=0.5) + error_feedback"])
def test_every_round_sends_what_is_predicted_and_replicas_agree(rest: str) -> None:
    strategy = Strategy.parse(f"diloco(period={PERIOD}, seconds={SECONDS}s) / all_reduce / {rest}")
    found, _, sent, _ = trained(str(strategy))
    specs = [laconic.TensorSpec.of(name, p) for name, p in LeastSquares().named_parameters()]
    predicted = strategy.wire_bytes_per_round(specs, len(STEP_S))
    assert predicted > 0
    assert sent == [[predicted] * ROUNDS] * len(STEP_S)
    for replicas in found:
        for other in replicas[1:]:
            assert all(torch.equal(other[name], replicas[0][name]) for name in NAMES)


def test_a_state_saved_after_a_round_goes_on_with_the_same_bits() -> None:
    strategy = f"diloco(period={PERIOD}, seconds={SECONDS}s) / all_reduce / int8 + error_feedback"
    whole = trained(strategy, rounds=4)[0]
    first = trained(strategy, rounds=2)
    rest = trained(strategy, rounds=2, saved=first[3])[0]
    for one, other in zip(itertools.chain(*whole[2:]), itertools.chain(*rest), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in NAMES)


def test_what_cannot_end_by_time_is_refused() -> None:
    with pytest.raises(IllegalCombination, match="does not form one sum over all ranks"):
        Strategy.parse("local_sgd(seconds=5s) / gossip")
    with pytest.raises(IllegalCombination, match="does not depend on a weight"):
        Strategy.parse("diloco(seconds=5s) / all_reduce / signsgd")
    with pytest.raises(laconic.LaconicError, match="seconds"):
        Strategy.parse("streaming_diloco(seconds=5s)")
    with pytest.raises(UsageError, match="end by time"):
        simulate("diloco(seconds=5s)", workload("resnet50"), hosts(4))
