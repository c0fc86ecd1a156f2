"""Laws of strategies whose replicas differ between rounds: local updates, gossip, and those two together."""

from __future__ import annotations

import copy
import dataclasses
import math
import threading
from collections.abc import Callable

import pytest
import torch

import laconic
from laconic.architecture import ARCHITECTURES, Architecture
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.transport import Work
from laconic.errors import CommunicationError
from laconic.strategy import Strategy, as_strategy
from laconic.synchronization import SYNCHRONIZATIONS, LocalUpdates, Synchronization
from tests.least_squares import NAMES, trained
from tests.runtime.replicas import assert_equal, data, keeps_momentum, snapshot
from tests.strategy.generate import with_partners

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore::laconic.errors.LaconicWarning")]
PERIOD = 4


def _short(method: Synchronization) -> Synchronization:
    method = method.planned(2 * PERIOD) if method.asks_for_length else method
    return dataclasses.replace(method, period=PERIOD) if isinstance(method, LocalUpdates) else method


RULES = [_short(method()) for method in SYNCHRONIZATIONS if method.barrier]
PLACES: list[Architecture] = [one() for one in ARCHITECTURES if not one().has_servers and not one.holds_shards]
MORE = [
    f"streaming_diloco(period={PERIOD}, overlap=3, fragments=2) / all_reduce / int4 + error_feedback",
    f"streaming_diloco(period={PERIOD}, overlap=2, fragments=3) / all_reduce / none / sequential",
    f"local_sgd(period={PERIOD}, post_local=3) / all_reduce / topk(density=0.2) + error_feedback / wfbp",
    f"diloco(period={PERIOD}) / all_reduce / powersgd + error_feedback",
    "bsp / gossip(random_pairs) / none / sequential",
    "bsp / push_sum(random_targets) / none / wfbp",
    "bsp / choco / topk(density=0.2) / wfbp",
    "bsp / choco(torus) / int8 + per_layer / sequential",
    f"local_sgd(period={PERIOD}) / gossip(one_peer_exponential)",
    f"local_sgd(period={PERIOD}) / push_sum(random_targets)",
    f"local_sgd(period={PERIOD}) / choco / int8",
    "bsp / power_gossip / powersgd(rank=2) / wfbp",
    f"local_sgd(period={PERIOD}) / power_gossip(torus) / powersgd(rank=1) / sequential",
]
STRATEGIES = [*dict.fromkeys([*map(with_partners, RULES), *map(with_partners, PLACES), *map(Strategy.parse, MORE)])]
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=str)


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 24), torch.nn.Tanh(), torch.nn.Linear(24, 12), torch.nn.BatchNorm1d(12)
    )


def _step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    rank: int,
    session: laconic.Session | None = None,
) -> None:
    loss = (model(data(step, rank, 6, 5)) - 1).square().mean()
    loss.backward()
    if session is not None:
        session.report_loss(loss)
    optimizer.step()
    optimizer.zero_grad()


def _sgd(model: torch.nn.Module, strategy: Strategy | str = "bsp") -> torch.optim.Optimizer:
    if as_strategy(strategy).synchronization.needs_adam:
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.0 if keeps_momentum(strategy) else 0.5)


def _parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def _by_rank(world_size: int, work: Callable[[InProcessTransport, torch.nn.Module], object]) -> list:
    """`work` on every rank, each with a model made before threads start: torch's generator is shared by all."""
    models = [_model() for _ in range(world_size)]
    cluster = InProcessCluster(world_size, timeout_s=20)
    return cluster.run(lambda transport: work(transport, models[transport.rank]))


@every_strategy
@pytest.mark.parametrize("world_size", [1, 3])
def test_replicas_are_identical_where_promised_and_can_always_be_averaged(strategy: Strategy, world_size: int) -> None:
    def one_rank(transport: InProcessTransport, model: torch.nn.Module) -> tuple:
        optimizer = _sgd(model, strategy)
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            for step in range(2 * PERIOD + 2):
                _step(model, optimizer, step, transport.rank, session)
            apart, before = session.consensus_distance(), _parameters(model)
            session.average()
            averaged = snapshot(model)
            assert session.consensus_distance() < 1e-6
            _step(model, optimizer, 99, transport.rank, session)
            after = session.consensus_distance()
        return apart, before, averaged, after

    found = _by_rank(world_size, one_rank)
    apart = found[0][0]
    identical = strategy.synchronization.replicas_identical and strategy.architecture.scope == "everyone"
    for distance, before, averaged, after in found:
        assert distance == apart
        assert_equal(averaged, found[0][2])
        assert math.isfinite(after)
        if identical:
            assert_equal(before, found[0][1])
    if identical or world_size == 1:
        assert apart < 1e-6
    else:
        assert 1e-6 < apart < 1


@every_strategy
@pytest.mark.parametrize("world_size", [3])
def test_bytes_over_whole_periods_are_as_predicted(strategy: Strategy, world_size: int) -> None:
    """Counted when nothing is in flight, over every round by itself: its parts, its number, its neighbours."""
    specs = [laconic.TensorSpec.of(name, p) for name, p in reversed([*_model().named_parameters()])]
    plans = strategy.plans(specs, world_size)
    # A round that has to wait for the end of a backward pass begins in the next step.
    late = strategy.mixes_parameters() and plans[0].launch == "after_backward"

    def one_rank(transport: InProcessTransport, model: torch.nn.Module) -> None:
        optimizer = _sgd(model, strategy)
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            for step in range(3 * PERIOD):
                before = session.traffic.sent_bytes("payload")
                rule = session.strategy.synchronization  # before the step: a round may change when the next is due
                _step(model, optimizer, step, transport.rank, session)
                session.wait()
                counted = session.traffic.sent_bytes("payload") - before
                complete = step if late else step + 1
                moment = Moment(complete - 1, transport.rank, world_size, rule.round_number(complete - 1))
                due = rule.due(complete) if complete else []
                predicted = sum(strategy.plan_bytes(plans[part], moment) for part in due)
                if strategy.exact():
                    assert counted == predicted, f"step {step}"
                assert counted <= predicted
                always = strategy.architecture.scope == "everyone" and not rule.lazy
                assert not always or (counted > 0) == (world_size > 1 and bool(due))

    _by_rank(world_size, one_rank)


@pytest.mark.slow
@every_strategy
def test_predicted_bytes_per_step_are_those_of_a_period(strategy: Strategy) -> None:
    rule = strategy.synchronization
    whole = max(2 * PERIOD, rule.cycle)

    def one_rank(transport: InProcessTransport, model: torch.nn.Module) -> tuple[int, float]:
        optimizer, counted = _sgd(model, strategy), []
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            for step in range(2 * PERIOD + whole):
                _step(model, optimizer, step, transport.rank, session)
                session.wait()
                counted.append(session.traffic.sent_bytes("payload"))
            predicted = session.predicted_bytes_per_step()
        return predicted, (counted[-1] - counted[PERIOD * 2 - 1]) / whole

    for predicted, counted in _by_rank(4, one_rank):
        if not strategy.exact():
            assert counted <= predicted
        elif strategy.architecture.scope == "everyone" or strategy.architecture.meets_the_same():
            # Rounded to whole bytes once per plan.
            assert abs(predicted - counted) <= 1, rule


@pytest.mark.slow
@every_strategy
@pytest.mark.parametrize("saved_after", [1, PERIOD + 2, 2 * PERIOD])
def test_saved_and_loaded_training_continues_bit_for_bit(strategy: Strategy, saved_after: int, tmp_path) -> None:
    """At every place of a period, also while rounds are on their way; loaded after attaching, replicas differ."""
    more = PERIOD + 2

    def one_rank(transport: InProcessTransport, model: torch.nn.Module) -> None:
        fresh, path = copy.deepcopy(model), tmp_path / f"rank{transport.rank}.pt"
        optimizer = _sgd(model, strategy)
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            for step in range(saved_after):
                _step(model, optimizer, step, transport.rank, session)
            parts = {"laconic": session, "model": model, "optimizer": optimizer}
            torch.save({key: part.state_dict() for key, part in parts.items()}, path)
            for step in range(saved_after, saved_after + more):
                _step(model, optimizer, step, transport.rank, session)
            uninterrupted = snapshot(model)
        loaded = torch.load(path, weights_only=True)
        optimizer = _sgd(fresh, strategy)
        with laconic.attach(fresh, optimizer, strategy, transport=transport) as session:
            fresh.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
            session.load_state_dict(loaded["laconic"])
            assert session.step == saved_after
            for step in range(saved_after, saved_after + more):
                _step(fresh, optimizer, step, transport.rank, session)
            assert_equal(snapshot(fresh), uninterrupted)

    _by_rank(3, one_rank)


@pytest.mark.parametrize("strategy", [one for one in STRATEGIES if not one.exchanges_gradients()], ids=str)
def test_detach_leaves_no_trace(strategy: Strategy) -> None:
    """Also while something is in flight; and the same transport can carry another session at once."""

    def one_rank(transport: InProcessTransport, model: torch.nn.Module) -> None:
        optimizer = _sgd(model, strategy)
        for _ in range(2):
            with laconic.attach(model, optimizer, strategy, transport=transport) as session:
                for step in range(PERIOD + 1):
                    _step(model, optimizer, step, transport.rank, session)
        assert not model._forward_pre_hooks
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        sent = transport.traffic.sent_bytes()
        _step(model, optimizer, 0, transport.rank)
        assert transport.traffic.sent_bytes() == sent

    _by_rank(2, one_rank)


@pytest.mark.parametrize(
    "text",
    [
        "bsp / gossip",
        "bsp / gossip(one_peer_exponential)",
        "bsp / gossip(random_pairs)",
        "bsp / push_sum(random_targets)",
        "bsp / choco / qsgd",
        "bsp / power_gossip",
        "local_sgd(period=3) / gossip(random_pairs)",
    ],
)
def test_when_rounds_leave_does_not_change_what_they_do(text: str) -> None:
    """Overlapped with the next gradient or after it: the same numbers, bit for bit."""
    parts = text.split(" / ") + ["none"] * (text.count("/") == 1)
    early, late = (
        trained(" / ".join([*parts, schedule]), world_size=5, steps=8)
        for schedule in ("fusion(1GiB, first_bytes=1GiB)", "sequential")
    )
    for step, (left, right) in enumerate(zip(early, late, strict=True)):
        for rank in range(5):
            assert all(torch.equal(left[rank][name], right[rank][name]) for name in NAMES), f"step {step}, rank {rank}"


class GatedCluster(InProcessCluster):
    """Nothing that is sent arrives before the gate of its rank is opened."""

    def __init__(self, world_size: int, *, patience_s: float) -> None:
        super().__init__(world_size, timeout_s=10)
        self.gates = [threading.Event() for _ in range(world_size)]
        self.patience_s = patience_s

    def transport(self, rank: int) -> InProcessTransport:
        return _GatedTransport(self, rank)


class _GatedTransport(InProcessTransport):
    cluster: GatedCluster

    def all_reduce(self, tensor: torch.Tensor, **rest: object) -> Work:
        return self._gated(super().all_reduce(tensor, **rest), rest)  # type: ignore[arg-type]

    def send_receive(self, sends: object, receives: object, **rest: object) -> Work:
        return self._gated(super().send_receive(sends, receives, **rest), rest)  # type: ignore[arg-type]

    def _gated(self, work: Work, rest: dict[str, object]) -> Work:
        gate = self.cluster.gates[self.rank]
        return work if rest.get("purpose") == "control" else _GatedWork(work, gate, self.cluster.patience_s)


class _GatedWork:
    def __init__(self, work: Work, gate: threading.Event, patience_s: float) -> None:
        self._work, self._gate, self._patience_s = work, gate, patience_s

    def wait(self) -> None:
        if not self._gate.wait(self._patience_s):
            raise CommunicationError("waited for what had not been sent yet.")
        self._work.wait()

    def done(self) -> bool:
        return self._gate.is_set() and self._work.done()


def _gated_steps(strategy: str, steps: int, open_after: int, *, patience_s: float = 10.0) -> list[list[int]]:
    """Train while nothing arrives; open the gate when `open_after` steps are complete. Steps in which a round ended."""
    cluster = GatedCluster(2, patience_s=patience_s)
    models = [_model() for _ in range(2)]

    def one_rank(transport: InProcessTransport) -> list[int]:
        model, events = models[transport.rank], laconic.EventList()
        optimizer = _sgd(model, strategy)
        with laconic.attach(model, optimizer, strategy, transport=transport, events=events):
            for step in range(steps):
                if step == open_after:
                    assert not [event for event in events.events if event.kind == "exchange"]
                    cluster.gates[transport.rank].set()
                _step(model, optimizer, step, transport.rank)
        return [event.step for event in events.events if event.kind == "wait"]

    return cluster.run(one_rank)


def test_steps_go_on_while_a_streaming_round_is_on_its_way() -> None:
    """The round begins after step 3 and counts after step 8: the steps between are made though nothing arrives."""
    text = "streaming_diloco(period=6, fragments=2, overlap=5)"
    assert _gated_steps(text, steps=9, open_after=7) == [[7], [7]]
    with pytest.raises(CommunicationError, match="had not been sent yet"):
        _gated_steps(text, steps=9, open_after=8, patience_s=0.2)


def test_without_overlap_a_round_is_waited_for() -> None:
    with pytest.raises(CommunicationError, match="had not been sent yet"):
        _gated_steps("diloco(period=3)", steps=4, open_after=3, patience_s=0.2)


def test_gossip_travels_during_the_next_gradient() -> None:
    """What was sent after the first step is waited for only when the second gradient is there."""
    cluster = GatedCluster(2, patience_s=10.0)
    models = [_model() for _ in range(2)]

    def one_rank(transport: InProcessTransport) -> None:
        model = models[transport.rank]
        optimizer = _sgd(model)
        with laconic.attach(model, optimizer, "bsp / gossip", transport=transport) as session:
            _step(model, optimizer, 0, transport.rank)
            model(data(1, transport.rank, 6, 5)).square().mean().backward()
            cluster.gates[transport.rank].set()
            optimizer.step()
            assert session.step == 2

    cluster.run(one_rank)


def test_rounds_are_measured_though_they_are_rare() -> None:
    """Norms are measured in every so many rounds, not in steps in which no round may ever begin."""
    models = [_model() for _ in range(2)]

    def one_rank(transport: InProcessTransport) -> list:
        model, events = models[transport.rank], laconic.EventList()
        optimizer = _sgd(model)
        text = f"diloco(period={PERIOD}) / all_reduce / int8 + error_feedback"
        with laconic.attach(model, optimizer, text, transport=transport, events=events):
            for step in range(PERIOD + 1):
                _step(model, optimizer, step, transport.rank)
        return [event.data for event in events.events if event.kind == "exchange"]

    for exchanges in InProcessCluster(2).run(one_rank):
        assert exchanges
        assert all("residual_norm" in entry for entry in exchanges)


def test_gossip_with_local_steps_keeps_no_anchor() -> None:
    """What nobody reads is not remembered."""

    def one_rank(transport: InProcessTransport, model: torch.nn.Module) -> dict:
        optimizer = _sgd(model)
        with laconic.attach(model, optimizer, "local_sgd(period=4) / gossip", transport=transport) as session:
            _step(model, optimizer, 0, transport.rank)
            return session.state_dict()["ranks"][str(transport.rank)]

    assert _by_rank(2, one_rank) == [{}, {}]


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        f"streaming_diloco(period={PERIOD}, overlap=3, fragments=2) / all_reduce / int4 + error_feedback",
        f"slowmo(period={PERIOD})",
        f"delayed(period={PERIOD})",
        f"scaffold(period={PERIOD})",
        f"noloco(period={PERIOD})",
        f"des_loc(period={PERIOD}) / all_reduce / int8 + error_feedback",
        f"zero_one_adam(total_steps={3 * PERIOD})",
        "demo / all_reduce / dct_topk",
        "demo / all_reduce / dct_cyclic",
        "dion / all_reduce / powersgd(rank=2)",
        "bsp / push_sum(random_targets)",
        "bsp / choco / int8",
        "bsp / power_gossip / powersgd(rank=2)",
    ],
)
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_another_number_of_workers_goes_on_from_a_saved_state(strategy: str, before: int, after: int) -> None:
    def first(transport: InProcessTransport, model: torch.nn.Module) -> tuple:
        optimizer = _sgd(model, strategy)
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            for step in range(PERIOD + 2):
                _step(model, optimizer, step, transport.rank)
            return copy.deepcopy((session.state_dict(), model.state_dict()))

    saved = _by_rank(before, first)
    states = laconic.runtime.redistribute([state for state, _ in saved], after)

    def second(transport: InProcessTransport, model: torch.nn.Module) -> tuple:
        optimizer = _sgd(model, strategy)
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            model.load_state_dict(saved[min(transport.rank, before - 1)][1])
            session.load_state_dict(states[transport.rank])
            for step in range(PERIOD + 2, 3 * PERIOD):
                _step(model, optimizer, step, transport.rank)
            apart = session.consensus_distance()
            session.average()
            return apart, _parameters(model)

    found = _by_rank(after, second)
    for apart, values in found:
        assert apart < 1
        assert_equal(values, found[0][1])
        assert all(bool(value.isfinite().all()) for value in values.values())


@pytest.mark.parametrize(
    "strategy",
    [
        "diloco(period=2)",
        "streaming_diloco(period=4, fragments=2)",
        "scaffold(period=2)",
        "des_loc(period=2, first_every=1, second_every=1)",
        "local_sgd(period=2) / push_sum",
        "local_sgd(period=2) / choco / int8",
    ],
)
def test_a_memory_format_that_changes_between_rounds_changes_nothing_else(strategy: str) -> None:
    def trained_with(changed_before: int) -> list[dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = torch.nn.Conv2d(3, 4, 2)

        def one_rank(transport: InProcessTransport) -> dict[str, torch.Tensor]:
            replica = copy.deepcopy(model)
            optimizer = _sgd(replica, strategy)
            with laconic.attach(replica, optimizer, strategy, transport=transport) as session:
                for step in range(6):
                    if step == changed_before:
                        replica.to(memory_format=torch.channels_last)
                    replica(data(step, transport.rank, 2, 3, 4, 4)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                session.average()
            return snapshot(replica)

        return InProcessCluster(2, timeout_s=20).run(one_rank)

    for usual, changed in zip(trained_with(-1), trained_with(3), strict=True):
        for name, value in usual.items():
            torch.testing.assert_close(changed[name], value, atol=1e-5, rtol=1e-5)
