"""Session state: what does not fit is refused, and a changed number of workers loses nothing that is owed."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import laconic
from laconic.compression import Bf16, ErrorFeedback
from laconic.core.exchange import Exchange, Group
from laconic.core.in_process import InProcessTransport
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState, Resize
from laconic.errors import CheckpointError
from laconic.runtime import redistribute
from tests.runtime.replicas import data, mlp, mlp_loss, sgd

STRATEGY = "bsp / all_reduce / bf16 + error_feedback / fusion"


def states(world_size: int, strategy: str = STRATEGY) -> list[dict]:
    def one_rank(transport: InProcessTransport) -> dict:
        model = mlp()
        optimizer = sgd(model, strategy)
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
        with laconic.attach(model, sgd(model, strategy), strategy, transport=transport) as session:
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


class Wide(torch.nn.Module):
    """With a matrix that a low rank makes smaller."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 9)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs)


def run(strategy: laconic.Strategy | str, world_size: int, before: list[dict] | None = None) -> list[dict]:
    """The states of all ranks after some steps, from given states on."""

    def one_rank(transport: InProcessTransport) -> dict:
        model = Wide()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            if before is not None:
                session.load_state_dict(before[transport.rank])
                return session.state_dict()
            for step in range(3):
                model(data(step, transport.rank, 4, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return session.state_dict()

    return laconic.InProcessCluster(world_size).run(one_rank)


def field(states: list[dict], name: str) -> list[torch.Tensor]:
    return [state["ranks"][str(rank)]["layer.weight"][name] for rank, state in enumerate(states)]


@pytest.mark.parametrize(("before", "after"), [(4, 3), (2, 4)])
def test_every_field_is_treated_as_its_method_says(before: int, after: int) -> None:
    strategy = "bsp / all_reduce / powersgd(rank=2) + error_feedback + momentum_correction / fusion"
    old = run(strategy, before)
    new = run(strategy, after, redistribute(old, after))
    for state in (old[0], new[0]):
        assert state["resize"] == {
            "powersgd.q": "copy",
            "error_feedback.residual": "sum",
            "momentum_correction.velocity": "sum",
            "rounds.pending": "reset",
        }
    for q in field(new, "powersgd.q"):
        assert torch.equal(q, field(old, "powersgd.q")[0])
    for name in ("error_feedback.residual", "momentum_correction.velocity"):
        torch.testing.assert_close(sum(field(new, name)), sum(field(old, name)))
        assert torch.equal(field(new, name)[1], field(old, name)[1]), "nobody was added to rank 1"
        assert any(value.any() for value in field(new, name))


def test_a_field_may_start_anew() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Counts(ErrorFeedback):
        """Remembers something that is worth nothing to other ranks."""

        name: ClassVar[str] = "counts"
        on_resize: ClassVar[Mapping[str, Resize]] = {**ErrorFeedback.on_resize, "counts.seen": "reset"}

        def init(self, bucket: Bucket) -> BucketState:
            state = super().init(bucket)
            state.flat["counts.seen"] = torch.full((bucket.numel,), 5.0)
            return state

        def exchange(
            self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
        ) -> Exchange:
            state.flat["counts.seen"] += 1
            return super().exchange(flat, state, group, own)

    strategy = laconic.Strategy(compression=Counts(Bf16()))
    old = run(strategy, 2)
    assert torch.equal(field(old, "counts.seen")[0], torch.full((9, 8), 8.0))
    new = run(strategy, 3, redistribute(old, 3))
    assert all(torch.equal(seen, torch.full((9, 8), 5.0)) for seen in field(new, "counts.seen"))
    torch.testing.assert_close(sum(field(new, "error_feedback.residual")), sum(field(old, "error_feedback.residual")))
    del old[0]["ranks"]["0"]["layer.weight"]["error_feedback.residual"]
    with pytest.raises(CheckpointError, match=r"nothing for error_feedback\.residual"):
        run(strategy, 2, old)


def test_states_from_before_fields_were_declared_add_up() -> None:
    old = states(2)
    for state in old:
        del state["resize"]
    load(old[0], 0, 2)
    new = redistribute(old, 1)
    name = "error_feedback.residual"
    total = sum(state["ranks"][str(rank)]["0.bias"][name] for rank, state in enumerate(old))
    torch.testing.assert_close(new[0]["ranks"]["0"]["0.bias"][name], total)
