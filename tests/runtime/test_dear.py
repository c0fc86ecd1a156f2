"""dear tries plans in its first steps, split and unsplit, and keeps the one with the shortest steps."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import laconic
from laconic.core.clock import VirtualClock
from laconic.core.in_process import InProcessTransport
from laconic.core.plan import Plan
from laconic.scheduling import dear
from laconic.scheduling.dear import Dear
from tests.runtime.replicas import assert_equal, mlp, mlp_loss, reference, sgd, snapshot
from tests.runtime.test_schedules import SETTLED, adam, awkward, awkward_loss, strategy

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("fastest", range(Dear.candidates))
def test_dear_keeps_the_plan_with_the_shortest_steps_and_splits_no_sums_where_that_is_faster(
    fastest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dear, "_TRIED", (1024, 512, 4))
    model = awkward()
    expected = reference(model, loss=awkward_loss, make_optimizer=adam, world_size=2, steps=SETTLED + 4)

    def one_rank(transport: InProcessTransport) -> tuple[list[Plan], dict[str, torch.Tensor]]:
        replica, clock = copy.deepcopy(model), VirtualClock()
        optimizer = adam(replica)
        plans: list[Plan] = []
        with laconic.attach(replica, optimizer, strategy("dear"), transport=transport, clock=clock) as session:
            for step in range(SETTLED + 4):
                plans.append(session.plan)
                clock.advance_to(clock.now() + (1.0 if (step - 1) // 6 == fastest else 2.0))
                awkward_loss(replica, step, transport.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
        return plans, snapshot(replica)

    for plans, state in laconic.InProcessCluster(2, timeout_s=10).run(one_rank):
        tried = plans[1 : 1 + 6 * Dear.candidates]
        assert [plan.decoupled for plan in tried] == [True] * 18 + [False] * 6
        assert all(one != other for one, other in itertools.combinations(tried[::6], 2))
        assert all(plan == tried[6 * fastest] for plan in plans[1 + 6 * Dear.candidates :])
        assert_equal(state, expected)


def test_a_plan_that_defers_nothing_frees_the_memory_of_the_one_before() -> None:
    model = mlp()

    def one_rank(transport: InProcessTransport) -> list[bool]:
        replica, clock, memory = copy.deepcopy(model), VirtualClock(), []
        optimizer = sgd(replica)
        with laconic.attach(replica, optimizer, strategy("dear"), transport=transport, clock=clock) as session:
            for step in range(SETTLED):
                clock.advance_to(clock.now() + (1.0 if step > 18 else 2.0))
                mlp_loss(replica, step, transport.rank).backward()
                if session.plan.deferred:
                    memory += [StorageWeakRef(flat.untyped_storage()) for flat in session._hooks._buckets.flats]
                optimizer.step()
                optimizer.zero_grad()
            assert not session.plan.deferred
            return [one.expired() for one in memory]

    for freed in laconic.InProcessCluster(2, timeout_s=10).run(one_rank):
        assert len(freed) >= 18
        assert all(freed)


@pytest.mark.parametrize("loaded_after", [9, 27])
def test_loading_a_state_begins_the_trial_of_dear_anew(loaded_after: int) -> None:
    model = mlp()

    def one_rank(transport: InProcessTransport) -> list[bool]:
        replica, clock, split = copy.deepcopy(model), VirtualClock(), []
        optimizer = sgd(replica)
        with laconic.attach(replica, optimizer, strategy("dear"), transport=transport, clock=clock) as session:
            for step in range(loaded_after + 30):
                clock.advance_to(clock.now() + (2.0 if session.plan.decoupled else 1.0))
                mlp_loss(replica, step, transport.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == loaded_after:
                    session.load_state_dict(session.state_dict())
                split.append(session.plan.decoupled)
        return split

    for split in laconic.InProcessCluster(2, timeout_s=10).run(one_rank):
        after = split[loaded_after:]
        assert after[:17] == [True] * 17
        assert not any(after[-4:])
