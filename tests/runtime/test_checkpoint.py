"""Session state: what does not fit is refused, and a changed number of workers loses nothing that is owed."""

from __future__ import annotations

import copy

import pytest
import torch

import laconic
from laconic.core.in_process import InProcessTransport
from laconic.errors import CheckpointError
from laconic.runtime import redistribute
from tests.runtime.replicas import mlp, mlp_loss, sgd

STRATEGY = "bsp / all_reduce / bf16 + error_feedback / fusion"


def states(world_size: int, strategy: str = STRATEGY) -> list[dict]:
    def one_rank(transport: InProcessTransport) -> dict:
        model = mlp()
        optimizer = sgd(model)
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            for step in range(3):
                mlp_loss(model, step, transport.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            return session.state_dict()

    return laconic.InProcessCluster(world_size).run(one_rank)


def load(state: dict, rank: int, world_size: int, strategy: str = STRATEGY) -> None:
    def one_rank(transport: InProcessTransport) -> None:
        model = mlp()
        with laconic.attach(model, sgd(model), strategy, transport=transport) as session:
            if transport.rank == rank:
                session.load_state_dict(state)

    laconic.InProcessCluster(world_size).run(one_rank)


def test_state_is_keyed_by_parameter_name_and_has_the_parameters_shape() -> None:
    saved = states(2)[1]
    assert saved["step"] == 3
    assert saved["strategy"] == STRATEGY
    residuals = saved["ranks"]["1"]
    assert {name: tuple(fields["error_feedback.residual"].shape) for name, fields in residuals.items()} == {
        name: tuple(parameter.shape) for name, parameter in mlp().named_parameters()
    }
    assert any(fields["error_feedback.residual"].any() for fields in residuals.values())


def test_saved_state_is_a_copy() -> None:
    saved = states(2)[0]
    before = copy.deepcopy(saved)
    load(saved, 0, 2)
    for name, fields in saved["ranks"]["0"].items():
        assert torch.equal(fields["error_feedback.residual"], before["ranks"]["0"][name]["error_feedback.residual"])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda state: state.pop("ranks"), "not a laconic session state"),
        (lambda state: state.update(format=99), "format 99"),
        (lambda state: state.update(strategy="bsp / all_reduce / fp16 / wfbp"), "Attach with the saved strategy"),
        (lambda state: state.update(world_size=8), "redistribute"),
        (lambda state: state.update(ranks={"1": state["ranks"]["0"]}), "this is rank 0"),
        (lambda state: state["ranks"]["0"].pop("0.bias"), "0.bias"),
        (lambda state: state["ranks"]["0"].update({"other.weight": {}}), "other.weight"),
        (
            lambda state: state["ranks"]["0"]["0.bias"].update({"error_feedback.residual": torch.zeros(9)}),
            r"\(9,\).*\(7,\)",
        ),
    ],
)
def test_state_that_does_not_fit_is_refused(change, complaint: str) -> None:
    state = states(2)[0]
    change(state)
    with pytest.raises(CheckpointError, match=complaint):
        load(state, 0, 2)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (4, 3), (2, 4), (3, 1)])
def test_owed_updates_survive_a_changed_number_of_workers(before: int, after: int) -> None:
    old = states(before)
    new = redistribute(old, after)
    assert len(new) == after
    for name in dict(mlp().named_parameters()):
        owed = [
            sum(state["ranks"][str(rank)][name]["error_feedback.residual"] for rank, state in enumerate(all_states))
            for all_states in (old, new)
        ]
        torch.testing.assert_close(owed[0], owed[1])
    if after > 1:
        load(new[0], 0, after)


def test_redistribute_needs_every_rank() -> None:
    with pytest.raises(CheckpointError, match="rank 1 is missing"):
        redistribute([states(2)[0]], 1)
    with pytest.raises(CheckpointError, match="got none"):
        redistribute([], 1)
