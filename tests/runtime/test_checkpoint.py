"""Session state: what does not fit is refused, and a changed number of workers loses nothing that is owed."""

from __future__ import annotations

import copy
import math
import re
import time
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
from laconic.errors import CheckpointError, CommunicationError
from laconic.runtime import redistribute
from tests.runtime.replicas import data, mlp, mlp_loss, sgd, snapshot

STRATEGY = "bsp / all_reduce / bf16 + error_feedback / fusion"


def states(world_size: int, strategy: str = STRATEGY) -> list[dict]:
    return [session for session, _ in saved(world_size, strategy)]


def saved(world_size: int, strategy: str = STRATEGY, steps: int = 3) -> list[tuple[dict, dict]]:
    """What every rank saves after some steps: session and model."""

    def one_rank(transport: InProcessTransport) -> tuple[dict, dict]:
        model = mlp()
        optimizer = sgd(model, strategy)
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            for step in range(steps):
                mlp_loss(model, step, transport.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            return session.state_dict(), copy.deepcopy(model.state_dict())

    return laconic.InProcessCluster(world_size, timeout_s=10).run(one_rank)


def load(found: list[tuple[dict, dict]], strategy: str = STRATEGY) -> list[str]:
    """Load what was saved, on every rank; the errors this gave."""

    def one_rank(transport: InProcessTransport) -> str:
        model = mlp()
        with laconic.attach(model, sgd(model, strategy), strategy, transport=transport) as session:
            state, values = found[transport.rank]
            model.load_state_dict(values)
            try:
                session.load_state_dict(state)
            except CheckpointError as error:
                return str(error)
        return ""

    return laconic.InProcessCluster(len(found), timeout_s=10).run(one_rank)


def test_state_is_keyed_by_parameter_name_and_has_the_parameters_shape() -> None:
    state = states(2)[1]
    assert state["step"] == 3
    assert state["strategy"] == STRATEGY
    residuals = state["ranks"]["1"]
    assert {name: tuple(fields["error_feedback.residual"].shape) for name, fields in residuals.items()} == {
        name: tuple(parameter.shape) for name, parameter in mlp().named_parameters()
    }
    assert any(fields["error_feedback.residual"].any() for fields in residuals.values())


def test_saved_state_is_a_copy() -> None:
    found = saved(2)
    before = copy.deepcopy(found[0][0])
    assert load(found) == ["", ""]
    for name, fields in found[0][0]["ranks"]["0"].items():
        assert torch.equal(fields["error_feedback.residual"], before["ranks"]["0"][name]["error_feedback.residual"])


KEYS = ("strategy", "world_size", "step", "order", "resize", "digest", "ranks")


def void(_: object) -> None:
    """Forget what an expression is worth."""


def residual(change):
    """Replace one residual in a saved state."""

    def apply(state: dict) -> None:
        fields = state["ranks"]["0"]["0.bias"]
        fields["error_feedback.residual"] = change(fields["error_feedback.residual"])

    return apply


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        *((lambda state, key=key: void(state.pop(key)), f"no {key}") for key in KEYS),
        (lambda state: void(state.pop("format")), "not a laconic session state"),
        (lambda state: [1], "not a laconic session state"),
        *((lambda state, step=step: state.update(step=step), '"step"') for step in (-5, 10**30, "x", math.nan, True)),
        *((lambda state, order=order: state.update(order=order), '"order"') for order in (None, ["0.weight", 1], {})),
        (lambda state: state.update(order=["0.weight"]), "the 1 parameters in the checkpoint are not the 4"),
        *((lambda state, ranks=ranks: state.update(ranks=ranks), '"ranks"') for ranks in ([], None, {0: {}})),
        (lambda state: state.update(ranks={"0": None}), "state of rank 0"),
        (lambda state: state.update(ranks={"0": {"0.bias": [1]}}), "state of rank 0"),
        (lambda state: state.update(world_size="2"), '"world_size"'),
        (lambda state: state.update(strategy=None), '"strategy"'),
        (lambda state: state.update(resize=None), '"resize"'),
        (lambda state: state.update(resize={"error_feedback.residual": "keep"}), '"resize"'),
        (lambda state: state.update(digest=None), '"digest"'),
        (lambda state: state.update(digest={"1": state["digest"]["0"]}), '"digest" of rank 0'),
        (lambda state: state.update(digest={"0": state["digest"]["0"][:1]}), '"digest" of 1 parameters'),
        (residual(lambda value: value * math.nan), "NaN or infinite"),
        (residual(lambda value: value + math.inf), "NaN or infinite"),
        (residual(lambda value: value.to(torch.complex64)), "complex"),
        (residual(lambda value: value.long()), "torch.int64"),
        (residual(lambda value: value.double()), "torch.float64"),
        (residual(lambda value: value.tolist()), "a list"),
        (residual(lambda value: None), "a NoneType"),
        (residual(lambda value: value.to("meta")), "without values"),
        (residual(lambda value: value.to_sparse()), "layout"),
        (lambda state: state["ranks"]["0"]["0.bias"].update({"bogus.field": torch.ones(3)}), "bogus.field"),
        (lambda state: state.update(format=99), "format 99"),
        (lambda state: state.update(strategy="bsp / all_reduce / fp16 / wfbp"), "Attach with the saved strategy"),
        (lambda state: state.update(world_size=8), "redistribute"),
        (lambda state: state.update(ranks={"1": state["ranks"]["0"]}), "this is rank 0"),
        (lambda state: void(state["ranks"]["0"].pop("0.bias")), "0.bias"),
        (lambda state: void(state["ranks"]["0"]["0.bias"].pop("error_feedback.residual")), "nothing for"),
        (lambda state: state["ranks"]["0"].update({"other.weight": {}}), "other.weight"),
        (
            lambda state: state["ranks"]["0"]["0.bias"].update({"error_feedback.residual": torch.zeros(9)}),
            r"\(9,\).*\(7,\)",
        ),
    ],
)
def test_state_that_does_not_fit_is_refused(change, complaint: str) -> None:
    found = saved(2)
    changed = change(found[0][0])
    if changed is not None and not isinstance(changed, Mapping):
        found[0] = (changed, found[0][1])
    first, second = load(found)
    assert re.search(complaint, first)
    assert second == f"rank 0 cannot load its state: {first}"


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
    assert load([(state, mlp().state_dict()) for state in new]) == [""] * after


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
            "error_feedback.owed": "reset",
            "momentum_correction.velocity": "sum",
            "rounds.pending": "copy",
        }
    for q in field(new, "powersgd.q"):
        assert torch.equal(q, field(old, "powersgd.q")[0])
    for name in ("error_feedback.residual", "momentum_correction.velocity"):
        torch.testing.assert_close(sum(field(new, name)), sum(field(old, name)))
        assert torch.equal(field(new, name)[1], field(old, name)[1]), "nobody was added to rank 1"
        assert any(value.any() for value in field(new, name))


@pytest.mark.parametrize(("before", "after"), [(4, 3), (4, 2), (2, 4)])
def test_residuals_in_eight_bits_add_up_to_what_these_can_hold(before: int, after: int) -> None:
    strategy, residual = "bsp / all_reduce / int4 + error_feedback(residual=int8) / fusion", "error_feedback.residual"
    old = run(strategy, before)
    again = run(strategy, before, [{**state, "digest": {}} for state in old])
    assert all(torch.equal(a, b) for a, b in zip(field(old, residual), field(again, residual), strict=True))
    new = run(strategy, after, redistribute(old, after))
    total = sum(value.double() for value in field(old, residual))
    found = sum(value.double() for value in field(new, residual))
    largest = max(value.abs().max().item() for value in field(old, residual)) * -(-before // after)
    assert total.any()
    torch.testing.assert_close(found, total, rtol=0, atol=after * largest / 127)
    if after > before:
        assert torch.equal(found, total), "nothing was added up"


@pytest.mark.parametrize(
    "strategy",
    [
        "bsp / all_reduce / topk(density=0.2) + error_feedback",
        "local_sgd(period=2) / all_reduce / topk(density=0.2) + error_feedback",
        "scaffold(period=2)",
        "delayed(period=2)",
        "adacomm(period=2)",
        "lag",
        "onebit_adam(total_steps=20, warmup_share=0.5)",
    ],
)
def test_what_one_worker_has_saved_goes_on_with_two(strategy: str) -> None:
    def train(transport: InProcessTransport, before: list[tuple[dict, dict]] | None) -> tuple[dict, dict]:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            if before is not None:
                state, parameters = before[transport.rank]
                model.load_state_dict(parameters)
                session.load_state_dict(state)
                for name, fields in session.state_dict()["ranks"][str(transport.rank)].items():
                    for kind, value in fields.items():
                        assert not kind.endswith(".anchor") or torch.equal(value, parameters[name])
            for step in range(session.step, session.step + 4):
                value = mlp_loss(model, step, transport.rank)
                value.backward()
                session.report_loss(value)
                optimizer.step()
                optimizer.zero_grad()
            return session.state_dict(), snapshot(model)

    ((state, parameters),) = laconic.InProcessCluster(1).run(lambda transport: train(transport, None))
    before = [(each, parameters) for each in redistribute([state], 2)]
    found = laconic.InProcessCluster(2).run(lambda transport: train(transport, before))
    assert [state["step"] for state, _ in found] == [8, 8]


def test_a_momentum_that_one_worker_has_not_kept_is_named() -> None:
    def one_rank(transport: InProcessTransport, before: dict | None) -> dict:
        model = mlp()
        strategy = "onebit_adam(total_steps=10)"
        with laconic.attach(model, torch.optim.AdamW(model.parameters()), strategy, transport=transport) as session:
            if before is not None:
                with pytest.raises(CheckpointError, match="written by one worker, on which onebit_adam is Adam as it"):
                    session.load_state_dict(before)
            return session.state_dict()

    (state,) = laconic.InProcessCluster(1).run(lambda transport: one_rank(transport, None))
    states = redistribute([{**state, "step": 4}], 2)
    laconic.InProcessCluster(2).run(lambda transport: one_rank(transport, states[transport.rank]))


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


@pytest.mark.parametrize(
    "strategy",
    [
        "bsp / all_reduce / randomk(density=0.5) + error_feedback / fusion",
        "local_sgd(period=2) / all_reduce / none / fusion",
        "bsp / push_sum / none / fusion",
        "bsp / all_reduce / none / priority",
    ],
)
def test_a_torn_checkpoint_is_refused_on_all_ranks(strategy: str) -> None:
    early, late = saved(3, strategy, steps=4), saved(3, strategy, steps=6)
    torn = [late[0], *((early[rank][0], late[0][1]) for rank in (1, 2))]
    for error in load(torn, strategy):
        assert "inconsistent: rank 0 loads a state saved after 6 steps, rank 1 one saved after 4" in error


def test_states_whose_gradients_come_in_another_order_were_not_saved_together() -> None:
    found = saved(2)
    found[1][0]["order"].reverse()
    for error in load(found):
        assert "rank 0 and rank 1 were not saved together" in error
    with pytest.raises(CheckpointError, match="step is 3 in the first and 4 in that of rank 1"):
        redistribute([states(2)[0], saved(2, steps=4)[1][0]], 1)


@pytest.mark.parametrize("strategy", ["diloco(period=4) / all_reduce / none / fusion", "bsp / gossip / none / fusion"])
def test_the_model_of_rank_0_on_all_ranks_is_noticed_where_replicas_differ(strategy: str) -> None:
    found = saved(2, strategy)
    assert load(found, strategy) == ["", ""]
    first, second = load([found[0], (found[1][0], found[0][1])], strategy)
    assert "not rank 0's on all, or call session.average() before you save both" in second
    assert "the model on rank 1 is not the one" in first


def test_averaged_replicas_may_be_loaded_from_rank_0() -> None:
    strategy = "diloco(period=4) / all_reduce / none / fusion"

    def one_rank(transport: InProcessTransport) -> tuple[dict, dict]:
        model = mlp()
        optimizer = sgd(model)
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            mlp_loss(model, 0, transport.rank).backward()
            optimizer.step()
            session.average()
            return session.state_dict(), copy.deepcopy(model.state_dict())

    found = laconic.InProcessCluster(2, timeout_s=10).run(one_rank)
    assert load([(state, found[0][1]) for state, _ in found], strategy) == ["", ""]


def test_the_session_loaded_before_the_model_says_which_comes_first() -> None:
    found = [(state, mlp().state_dict()) for state, _ in saved(2)]
    for error in load(found):
        assert "Load the model before the session" in error
        assert "Replicas differ" not in error


EVERY_FAMILY = [
    "bsp / all_reduce / topk(0.5) + error_feedback / fusion",
    "bsp / all_reduce / none / priority",
    "diloco(period=2) / all_reduce / none / fusion",
    "bsp / gossip / none / fusion",
    "asp / gossip / none / fusion",
    "asp / parameter_server / none / fusion",
    "ssp / parameter_server / none / fusion",
]


@pytest.mark.parametrize("strategy", EVERY_FAMILY)
@pytest.mark.parametrize("operation", ["state_dict", "average", "consensus_distance"])
def test_one_rank_alone_is_told_so_and_does_not_hang(strategy: str, operation: str) -> None:
    """Rank 1 makes two more steps, or leaves, while rank 0 waits for it."""

    def one_rank(transport: InProcessTransport) -> str:
        model = mlp()
        optimizer = sgd(model)
        try:
            with laconic.attach(model, optimizer, strategy, transport=transport) as session:
                for step in range(4 if transport.rank else 2):
                    mlp_loss(model, step, transport.rank).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if transport.rank == 0:
                    getattr(session, operation)()
        except CommunicationError as error:
            return str(error)
        return ""

    began_s = time.monotonic()
    first, second = laconic.InProcessCluster(2, timeout_s=20).run(one_rank)
    assert time.monotonic() - began_s < 15
    assert f"rank 0 is in {operation}() after 2 steps, while rank 1" in first
    assert f"Every rank must call {operation}()" in first
    if not strategy.startswith(("asp", "ssp")):
        assert f"rank 0 is in {operation}() after 2 steps" in second


@pytest.mark.parametrize("strategy", ["bsp", "diloco(period=4)", "bsp / gossip / none / fusion"])
def test_different_numbers_of_steps_are_named_where_all_ranks_meet(strategy: str) -> None:
    def one_rank(transport: InProcessTransport) -> str:
        model = mlp()
        optimizer = sgd(model)
        try:
            with laconic.attach(model, optimizer, strategy, transport=transport) as session:
                if transport.rank == 0:
                    session.state_dict()
                else:
                    session.average()
        except CommunicationError as error:
            return str(error)
        return ""

    for error in laconic.InProcessCluster(2, timeout_s=10).run(one_rank):
        assert "rank 0 is in state_dict() after 0 steps, rank 1 is in average() after 0 steps" in error
