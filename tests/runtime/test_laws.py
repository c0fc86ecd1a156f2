"""Laws that every strategy keeps, run over all registered methods in real training of replicas in threads."""

from __future__ import annotations

import copy
from itertools import cycle, product

import pytest
import torch

import laconic
from laconic.compression import COMPRESSORS, Bf16, Compressor, ErrorFeedback, NoCompression, PowerSgd, Wrapper
from laconic.core.in_process import InProcessTransport
from laconic.core.moment import Moment
from laconic.scheduling import SCHEDULES
from laconic.strategy import Strategy
from tests.runtime.replicas import assert_equal, data, mlp, mlp_loss, reference, sgd, snapshot, train
from tests.strategy.generate import nearest, wrapped

pytestmark = pytest.mark.filterwarnings("ignore::laconic.errors.LaconicWarning")


def _compressors() -> list[Compressor]:
    plain = [method() for method in COMPRESSORS if not issubclass(method, Wrapper)]
    return plain + [stack for turn, inner in enumerate(plain) for stack in wrapped(inner, turn)]


def _mlp() -> torch.nn.Module:
    """With a matrix large enough for every method to work on."""
    return torch.nn.Sequential(mlp(), torch.nn.Linear(3, 24), torch.nn.Tanh(), torch.nn.Linear(24, 12))


# Every compressor under one schedule by turns, and every schedule with methods of one round and of several.
_TURNS = zip(_compressors(), cycle(SCHEDULES), strict=False)
_PAIRS = product([NoCompression(), ErrorFeedback(Bf16()), PowerSgd()], SCHEDULES)
STRATEGIES = [
    *dict.fromkeys(
        nearest({"compression": method, "scheduling": schedule()}) for method, schedule in [*_TURNS, *_PAIRS]
    )
]
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=str)


@every_strategy
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_replicas_end_identical_and_bytes_are_as_predicted(strategy: Strategy, world_size: int) -> None:
    original = _mlp()

    def one_rank(transport: InProcessTransport) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(original)
        optimizer = sgd(model, strategy)
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            for step in range(4):
                predicted = session.predicted_bytes_per_step()
                before = session.traffic.sent_bytes("payload")
                mlp_loss(model, step, transport.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
                session.wait()
                counted = session.traffic.sent_bytes("payload") - before
                specs = [laconic.TensorSpec.of(name, p) for name, p in model.named_parameters()]
                if step:  # the first step does not know the order yet, so its buckets may differ
                    moment = Moment(step, transport.rank, world_size, round=step)
                    planned = strategy.plan_bytes_per_step(strategy.plan(specs), moment)
                    assert counted <= predicted
                    assert predicted == planned
                    if strategy.compression.traits.exact_bytes:
                        assert counted == predicted
            assert session.traffic.sent_bytes("buffers") == 0
        return snapshot(model)

    states = laconic.InProcessCluster(world_size).run(one_rank)
    for state in states[1:]:
        assert_equal(states[0], state)


@pytest.mark.slow
@every_strategy
def test_saved_and_loaded_training_continues_bit_for_bit(strategy: Strategy, tmp_path) -> None:
    original = _mlp()

    def one_rank(transport: InProcessTransport) -> None:
        model = copy.deepcopy(original)
        optimizer = sgd(model, strategy)

        def steps(session: laconic.Session, first: int, last: int) -> dict[str, torch.Tensor]:
            for step in range(first, last):
                mlp_loss(model, step, transport.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert session.step == last
            return snapshot(model)

        path = tmp_path / f"rank{transport.rank}.pt"
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            steps(session, 0, 2)
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "laconic": session.state_dict()}
            torch.save(copy.deepcopy(saved), path)
            uninterrupted = steps(session, 2, 5)
        loaded = torch.load(path, weights_only=True)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            session.load_state_dict(loaded["laconic"])
            assert_equal(steps(session, 2, 5), uninterrupted)

    laconic.InProcessCluster(3).run(one_rank)  # three: sums of two do not depend on their order


@pytest.mark.parametrize("schedule", [method.name for method in SCHEDULES])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_lossless_strategies_equal_the_average_computed_by_hand(schedule: str, world_size: int) -> None:
    states = train(mlp(), f"bsp / all_reduce / none / {schedule}", world_size=world_size)
    assert_equal(states[0], reference(mlp(), world_size=world_size))


@pytest.mark.slow
@every_strategy
def test_detach_leaves_no_trace(strategy: Strategy) -> None:
    original = torch.nn.Sequential(_mlp(), torch.nn.BatchNorm1d(12))

    def one_rank(transport: InProcessTransport) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(original)
        optimizer = sgd(model, strategy)
        before = {key: copy.copy(value) for key, value in vars(model).items()}
        keys = list(model.state_dict())
        with laconic.attach(model, optimizer, strategy, transport=transport):
            model(data(0, transport.rank, 4, 5)).square().mean().backward()
            optimizer.step()
        averaged = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        assert list(model.state_dict()) == keys
        assert vars(model).keys() == before.keys()
        assert not model._forward_pre_hooks
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        for parameter in model.parameters():
            assert not parameter._post_accumulate_grad_hooks
            assert parameter.grad is not None
            assert parameter.grad._base is None
        sent = transport.traffic.sent_bytes()
        model(data(1, transport.rank, 4, 5)).square().mean().backward()
        optimizer.step()
        assert transport.traffic.sent_bytes() == sent
        return averaged

    assert_equal(*laconic.InProcessCluster(2).run(one_rank))
