"""A saved state of servers that is damaged is refused by name, on every rank, before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

import laconic
from laconic.core.in_process import InProcessTransport
from laconic.errors import CheckpointError
from laconic.runtime.servers.saved_state import NAMES, check_optimizer_state, names_of
from tests.runtime.replicas import assert_equal, mlp, snapshot
from tests.runtime.servers.one_worker import steps

pytestmark = pytest.mark.timeout(60)
ASP = "asp / parameter_server"
BSP = "bsp / parameter_server / topk(0.5) + error_feedback"
NAN = float("nan")

Fields = dict[str, torch.Tensor]


def drop(prefix: str) -> Callable[[Fields], None]:
    def damage(fields: Fields) -> None:
        for field in [field for field in fields if field.startswith(prefix)]:
            del fields[field]

    return damage


def change(prefix: str, to: Callable[[torch.Tensor], object]) -> Callable[[Fields], None]:
    def damage(fields: Fields) -> None:
        for field in [field for field in fields if field.startswith(prefix)]:
            fields[field] = to(fields[field])  # type: ignore[assignment]

    return damage


def rename(fields: Fields) -> None:
    fields["server.evil|2"] = fields.pop("server.exp_avg|2")


def add(fields: Fields) -> None:
    fields["server.evil|0"] = torch.ones(1)


DAMAGES = {
    "all dropped": (ASP, drop("server."), "does not say what servers remember of parameter 0.weight: server.fields"),
    "names dropped": (ASP, drop(NAMES), "does not say what servers remember of parameter 0.weight"),
    "names unreadable": (ASP, change(NAMES, torch.zeros_like), "server.fields.1 of parameter 0.weight that cannot be"),
    "a field dropped": (ASP, drop("server.exp_avg|"), "lacks server.exp_avg.2 of parameter 0.weight"),
    "a count dropped": (ASP, drop("server.step"), "lacks server.step.0 of parameter 0.weight"),
    "renamed": (ASP, rename, "lacks server.exp_avg.2 of parameter 0.weight, .*, but has server.evil.2"),
    "one more": (ASP, add, "has server.evil.0 of parameter 0.weight, which servers do not remember"),
    "NaN": (ASP, change("server.exp_avg|", lambda x: x * NAN), "NaN .* for server.exp_avg.2 of parameter 0.weight"),
    "infinite": (ASP, change("server.exp_avg_sq", lambda x: x / 0), "infinite values for server.exp_avg_sq.2"),
    "shorter": (ASP, change("server.exp_avg|", lambda x: x[:-1]), r"\d+ values for server.exp_avg.2 .* need \d+"),
    "longer": (ASP, change("server.step", lambda x: torch.ones(3)), "3 values for server.step.0 .* need 1"),
    "float64": (ASP, change("server.exp_avg|", torch.Tensor.double), "float64 for server.exp_avg.2 .* need float32"),
    "whole numbers": (ASP, change("server.exp_avg|", torch.Tensor.long), "int64 for server.exp_avg.2 .* need float32"),
    "complex": (
        ASP,
        change("server.exp_avg|", lambda x: x + 1j),
        "complex numbers for server.exp_avg.2",
    ),
    "sparse": (
        ASP,
        change("server.exp_avg|", torch.Tensor.to_sparse),
        "sparse_coo.* for server.exp_avg.2 .* ordinary tensor",
    ),
    "meta": (
        ASP,
        change("server.exp_avg|", lambda x: x.to("meta")),
        "without values for server.exp_avg.2 .* ordinary tensor",
    ),
    "a list": (ASP, change("server.exp_avg|", torch.Tensor.tolist), "list for server.exp_avg.2 .* ordinary"),
    "a step below zero": (ASP, change("server.step", lambda x: x - 10), "-5 for server.step.0 .* whole number .* >= 0"),
    "half a step": (ASP, change("server.step", lambda x: x + 0.5), "5.5 for server.step.0 of parameter 0.weight"),
    "sums dropped": (BSP, drop("server."), "lacks server.error_feedback.residual.1 of parameter 0.weight"),
    "sums NaN": (BSP, change("server.", lambda x: x * NAN), "NaN .* for server.error_feedback.residual.1"),
    "sums shorter": (BSP, change("server.", lambda x: x[:-1]), r"values for server.error_feedback.residual.1 .* need"),
    "sums float64": (BSP, change("server.", torch.Tensor.double), "float64 for server.error_feedback.residual.1"),
}


def trained(transport: InProcessTransport, strategy: str):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session = laconic.attach(model, optimizer, strategy, transport=transport)
    steps(model, optimizer, 3 - transport.rank if strategy == ASP else 3, rank=transport.rank)
    return model, session


@pytest.mark.slow
@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_state_is_refused_on_every_rank_and_changes_nothing(case: str) -> None:
    strategy, damage, told = DAMAGES[case]

    def one(transport: InProcessTransport) -> None:
        model, session = trained(transport, strategy)
        with session:
            saved = copy.deepcopy(session.state_dict())
            before, values = copy.deepcopy(saved["ranks"][str(transport.rank)]), snapshot(model)
            if transport.rank == 0:
                damage(saved["ranks"]["0"]["0.weight"])
            with pytest.raises(CheckpointError, match=told):
                session.load_state_dict(saved)
            assert_equal(snapshot(model), values)
            after = session.state_dict()["ranks"][str(transport.rank)]
            for name, fields in before.items():
                assert_equal(after[name], fields)

    laconic.InProcessCluster(2, timeout_s=10).run(one)


def test_a_parameter_that_has_had_no_gradient_has_nothing_to_lose() -> None:
    like = torch.zeros(3)
    check_optimizer_state("w", {NAMES: names_of([])}, like)
    check_optimizer_state("w", {NAMES: names_of(["step|0"]), "server.step|0": torch.tensor([4.0])}, like)
    with pytest.raises(CheckpointError, match=r"lacks server.step.0 of parameter w"):
        check_optimizer_state("w", {NAMES: names_of(["step|0"])}, like)


def test_the_size_of_the_names_does_not_depend_on_them() -> None:
    assert names_of([]).shape == names_of(["step|0", "exp_avg|2", "exp_avg_sq|2", "max_exp_avg_sq|2"]).shape


def test_a_state_for_another_number_of_workers_loads() -> None:
    def save(transport: InProcessTransport) -> tuple[dict, dict[str, torch.Tensor]]:
        model, session = trained(transport, ASP)
        with session:
            return copy.deepcopy(session.state_dict()), snapshot(model)

    saved = laconic.InProcessCluster(2, timeout_s=10).run(save)
    states = laconic.runtime.redistribute([state for state, _ in saved], 3)

    def load(transport: InProcessTransport) -> dict:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with laconic.attach(model, optimizer, ASP, transport=transport) as session:
            model.load_state_dict(saved[0][1])
            session.load_state_dict(states[transport.rank])
            return copy.deepcopy(session.state_dict())["ranks"][str(transport.rank)]

    found = laconic.InProcessCluster(3, timeout_s=10).run(load)[0]
    for name, fields in saved[0][0]["ranks"]["0"].items():
        assert_equal(found[name], fields)
