"""Ranks with different numbers of batches: with session.join() they train as under torch's Join."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import laconic
from laconic.core.in_process import InProcessTransport
from laconic.errors import CommunicationError
from tests.processes import run_processes
from tests.runtime.replicas import assert_equal, mlp, mlp_loss, sgd, snapshot


def uneven(
    strategy: str,
    batches: list[int],
    *,
    model=mlp,
    make_optimizer=sgd,
    after: int = 0,
    finish=lambda session: None,
    divide_by_initial_world_size: bool = True,
    **options: bool,
) -> list[dict[str, torch.Tensor]]:
    """Every rank trains on its own number of batches, then all on `after` more."""
    original = model()

    def one_rank(transport: InProcessTransport) -> dict[str, torch.Tensor]:
        replica = copy.deepcopy(original)
        optimizer = make_optimizer(replica)

        def train(steps: range) -> None:
            for step in steps:
                mlp_loss(replica, step, transport.rank).backward()
                optimizer.step()
                optimizer.zero_grad()

        with laconic.attach(replica, optimizer, strategy, transport=transport, **options) as session:
            mine = batches[transport.rank]
            with session.join(divide_by_initial_world_size=divide_by_initial_world_size):
                train(range(mine))
            assert session.step == max(batches)
            train(range(mine, mine + after))
            assert session.step == max(batches) + after
            finish(session)
        return snapshot(replica)

    return laconic.InProcessCluster(len(batches), timeout_s=10).run(one_rank)


def expected(batches: list[int], make_optimizer=sgd, *, by_initial: bool = True) -> dict[str, torch.Tensor]:
    """The same in one process: a rank without data contributes nothing."""
    model = mlp()
    optimizer = make_optimizer(model)
    for step in range(max(batches)):
        active = [rank for rank, count in enumerate(batches) if step < count]
        shares = []
        for rank in active:
            optimizer.zero_grad()
            mlp_loss(model, step, rank).backward()
            divisor = len(batches) if by_initial else len(active)
            shares.append([parameter.grad * (1.0 / divisor) for parameter in model.parameters()])
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = sum(share[index] for share in shares)
        optimizer.step()
    return snapshot(model)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


SCHEDULES = ["sequential", "wfbp", "fusion", "mg_wfbp", "priority", "dear"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("batches", [[5, 3], [2, 6, 4], [0, 3]])
def test_ranks_without_data_contribute_nothing(schedule: str, batches: list[int]) -> None:
    found = uneven(f"bsp / all_reduce / none / {schedule}", batches, make_optimizer=adamw)
    for state in found:
        assert_equal(state, expected(batches, adamw))


@pytest.mark.parametrize("batches", [[5, 3], [2, 6, 4]])
def test_the_mean_may_be_over_the_ranks_that_have_data(batches: list[int]) -> None:
    for state in uneven("bsp", batches, divide_by_initial_world_size=False):
        assert_equal(state, expected(batches, by_initial=False))


def test_moments_are_means_over_the_ranks_that_have_data() -> None:
    """Rank 1 has one batch: from then on, rank 0 trains as if it were alone."""
    models = [mlp(), mlp()]
    optimizers = [adamw(model) for model in models]
    for rank, model in enumerate(models):
        mlp_loss(model, 0, rank).backward()
        optimizers[rank].step()
    with torch.no_grad():
        for mine, other in zip(*(model.parameters() for model in models), strict=True):
            mine.add_(other).div_(2)
            for moment in ("exp_avg", "exp_avg_sq"):
                optimizers[0].state[mine][moment].add_(optimizers[1].state[other][moment]).div_(2)
    for step in range(1, 6):
        optimizers[0].zero_grad()
        mlp_loss(models[0], step, 0).backward()
        optimizers[0].step()

    strategy = "des_loc(period=1, first_every=1, second_every=1)"
    for found in uneven(strategy, [6, 1], divide_by_initial_world_size=False, make_optimizer=adamw):
        for name, value in snapshot(models[0]).items():
            torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("find_unused_parameters", [True, False])
def test_replicas_stay_equal_in_the_steps_that_follow(find_unused_parameters: bool) -> None:
    """The optimizer's state is that of the rank that trained last, too."""
    for make in (sgd, adamw):
        found = uneven("bsp", [4, 1, 3], after=3, make_optimizer=make, find_unused_parameters=find_unused_parameters)
        for state in found[1:]:
            assert_equal(state, found[0])


@pytest.mark.parametrize(
    "compression", ["fp16", "int8", "topk(0.5) + error_feedback", "powersgd(rank=1) + error_feedback", "qsgd", "onebit"]
)
def test_every_kind_of_compression_takes_part(compression: str) -> None:
    first, *others = uneven(f"bsp / all_reduce / {compression} / fusion", [5, 2, 3], after=2)
    for other in others:
        assert_equal(other, first)
    assert all(value.isfinite().all() for value in first.values())


@pytest.mark.parametrize(
    "strategy",
    [
        "diloco(period=3) / all_reduce / none / fusion",
        "slowmo(period=2) / all_reduce / none / fusion",
        "streaming_diloco(period=4, fragments=2, overlap=1) / all_reduce / none / fusion",
        "diloco(period=3) / all_reduce / topk(0.5) + error_feedback / fusion",
    ],
)
def test_local_updates_go_on_with_rounds(strategy: str) -> None:
    first, *others = uneven(strategy, [9, 4, 7], after=3, finish=lambda session: session.average())
    for other in others:
        assert_equal(other, first)


def test_what_a_rank_did_before_it_ran_out_counts_in_the_next_round() -> None:
    """local_sgd: x = mean of replicas; rank 1 stops after its first step, the round comes after the second."""
    first, second = uneven("local_sgd(period=2) / all_reduce / none / fusion", [2, 1])

    def alone(rank: int, steps: int) -> dict[str, torch.Tensor]:
        model = mlp()
        optimizer = sgd(model)
        for step in range(steps):
            mlp_loss(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model)

    ends = [alone(0, 2), alone(1, 1)]
    for name, value in first.items():
        torch.testing.assert_close(value, (ends[0][name] + ends[1][name]) / 2)
        assert torch.equal(second[name], value)


@pytest.mark.parametrize(
    "strategy",
    [
        "bsp / gossip / none / fusion",
        "bsp / parameter_server / none / fusion",
        "asp / parameter_server / none / fusion",
        "bsp / all_reduce / signsgd / fusion",
    ],
)
def test_what_cannot_go_on_without_data_is_refused_by_name(strategy: str) -> None:
    with pytest.raises(CommunicationError, match=r"join\(\) does not work with"):
        uneven(strategy, [2, 2])


def test_ranks_inside_must_do_the_same_until_they_run_out() -> None:
    def one_rank(transport: InProcessTransport) -> None:
        model = mlp()
        optimizer = sgd(model)
        with laconic.attach(model, optimizer, "bsp", transport=transport) as session, session.join():
            mlp_loss(model, 0, transport.rank).backward()
            if transport.rank == 0:
                optimizer.step()
            optimizer.zero_grad()
            mlp_loss(model, 1, transport.rank).backward()

    with pytest.raises(CommunicationError, match=r"rank 0 is in the backward pass of step 1, rank 1 .* of step 0"):
        laconic.InProcessCluster(2, timeout_s=10).run(one_rank)


def test_operations_of_all_ranks_wait_until_the_block_has_ended() -> None:
    def one_rank(transport: InProcessTransport) -> None:
        model = mlp()
        with laconic.attach(model, sgd(model), "bsp", transport=transport) as session, session.join():
            session.state_dict()

    with pytest.raises(CommunicationError, match=r"state_dict\(\) was called inside session.join\(\)"):
        laconic.InProcessCluster(2, timeout_s=10).run(one_rank)


def test_an_error_inside_is_the_one_that_is_seen() -> None:
    def one_rank(transport: InProcessTransport) -> None:
        model = mlp()
        with laconic.attach(model, sgd(model), "bsp", transport=transport) as session, session.join():
            if transport.rank == 1:
                raise ValueError("bad sample 17")

    with pytest.raises(ValueError, match="bad sample 17"):
        laconic.InProcessCluster(2, timeout_s=10).run(one_rank)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(120)
@pytest.mark.parametrize("batches", [[5, 3], [2, 6, 4]])
def test_the_model_is_what_torch_join_gives_bit_for_bit(batches: list[int]) -> None:
    results = run_processes(
        "tests.runtime.ranks:uneven_like_torch_join",
        world_size=len(batches),
        arguments={"batches": batches},
        timeout_s=110,
    )
    for result in results:
        for theirs, ours in result.value.values():
            assert_equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(120)
def test_uneven_work_without_join_ends_in_a_named_error() -> None:
    """9 and 7 steps, then average(): Gloo ended the process where an exchange met one of another size."""
    strategies = ["diloco(period=4)", "ddp", "bsp / gossip / none / fusion", "bsp / all_reduce / topk(0.5) / fusion"]
    results = run_processes(
        "tests.runtime.ranks:uneven_then_average", world_size=2, arguments={"strategies": strategies}, timeout_s=110
    )
    for strategy in strategies:
        for result in results:
            error, seconds = result.value[strategy]
            assert "rank 1 is in average() after 7 steps, while rank 0 is in" in error, (strategy, error)
            assert "Every rank must call average() after the same number of steps" in error
            assert seconds < 8
