"""Parameters held by a server, driven by hand: formulas, clocks, and what garbage does to them."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from laconic.core.frames import Frame
from laconic.core.moment import Moment
from laconic.core.payload import Payload
from laconic.errors import CommunicationError
from laconic.runtime.servers.protocol import PUSH, group_settings
from tests.runtime.servers.hand_made import BUCKET, SGD, ShelfByHand

ADAMW = group_settings(torch.optim.AdamW([torch.zeros(1)], lr=0.1).param_groups[0])


def gradient(step: int, rank: int = 0) -> torch.Tensor:
    return torch.randn(BUCKET.numel, generator=torch.Generator().manual_seed(100 * step + rank))


def test_asp_applies_each_gradient_as_it_comes_at_a_rate_divided_by_the_workers() -> None:
    server = ShelfByHand("asp / parameter_server", 4)
    x = server.start.clone()
    for step, rank in enumerate([0, 3, 3, 1, 2, 3]):
        server.push(rank, gradient(step, rank), step)
        x -= 0.5 / 4 * gradient(step, rank)
        torch.testing.assert_close(server.answers.frames[-1].tensors[0], x, rtol=0, atol=1e-6)


def test_staleness_is_the_number_of_gradients_of_others_in_between() -> None:
    server = ShelfByHand("asp / parameter_server", 3)
    order = [0, 1, 1, 2, 0, 0, 1, 2, 2]
    expected, last = [], {}
    for place, rank in enumerate(order):
        expected.append(place - last.get(rank, -1) - 1)
        last[rank] = place
        server.push(rank, gradient(place), place)
    assert [json.loads(frame.note)["staleness"] for frame in server.answers.frames] == expected


def test_a_pull_makes_a_worker_fresh() -> None:
    server = ShelfByHand("asp / parameter_server", 2)
    server.push(0, gradient(0))
    server.push(0, gradient(1))
    server.store.pull(1)
    server.push(1, gradient(2))
    assert json.loads(server.answers.frames[-1].note)["staleness"] == 0


def test_rates_divided_by_staleness() -> None:
    server = ShelfByHand("asp(learning_rate=staleness) / parameter_server", 3)
    x, last = server.start.clone(), [0, 0, 0]
    for step, rank in enumerate([0, 1, 2, 2, 0, 1, 0]):
        x -= 0.5 / (1 + step - last[rank]) * gradient(step, rank)
        last[rank] = step + 1
        server.push(rank, gradient(step, rank), step)
        torch.testing.assert_close(server.answers.frames[-1].tensors[0], x, rtol=0, atol=1e-5)


def test_delay_compensation() -> None:
    server = ShelfByHand("asp(delay_compensation=0.4, learning_rate=full) / parameter_server", 3)
    x = server.start.clone()
    then = [x.clone() for _ in range(3)]
    for step, rank in enumerate([0, 1, 1, 2, 0, 2, 1]):
        g = 0.1 * gradient(step, rank)
        x -= 0.5 * (g + 0.4 * g * g * (x - then[rank]))
        then[rank] = x.clone()
        server.push(rank, 0.1 * gradient(step, rank), step)
        torch.testing.assert_close(server.answers.frames[-1].tensors[0], x, rtol=0, atol=1e-5)


def test_parameters_that_come_back_compressed_lose_nothing_for_good() -> None:
    server = ShelfByHand("asp(learning_rate=full) / parameter_server / topk(0.3) + error_feedback", 2)
    back = server.compression.back().forgetful()
    mine = [server.start.clone() for _ in range(2)]

    def take(rank: int, step: int) -> None:
        state = back.init(BUCKET)
        state.moment = Moment(step, rank, 2, step)
        change = torch.empty(BUCKET.numel)
        back.decode(Payload(server.answers.to(rank)[-1].tensors), change, state)
        assert int((change != 0).sum()) <= 4  # ceil(0.3 * 6) + ceil(0.3 * 5)
        mine[rank] += change

    for step in range(6):
        for rank in (0, 1):
            server.push(rank, gradient(step, rank), step)
            take(rank, step)
    for step in range(6, 30):  # nothing new: what is owed comes bit by bit
        for rank in (0, 1):
            server.push(rank, torch.zeros(BUCKET.numel), step)
            take(rank, step)
    for one in mine:
        torch.testing.assert_close(one, server.values(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_fastest_is_never_answered_too_far_ahead_of_the_slowest(staleness: int) -> None:
    server = ShelfByHand(f"ssp(staleness={staleness}) / parameter_server", 3)
    for step in range(staleness):
        server.push(0, gradient(step), step)
    assert len(server.answers.to(0)) == staleness
    server.push(0, gradient(9), staleness)
    assert len(server.answers.to(0)) == staleness, "rank 0 is ahead by one step more than it may be"
    assert server.store.waiting_for()[1] == [1, 2]
    server.push(1, gradient(9, 1))
    assert server.store.waiting_for()[1] == [2]
    assert len(server.answers.to(0)) == staleness
    server.push(2, gradient(9, 2))
    assert len(server.answers.to(0)) == staleness + 1
    assert server.store.waiting_for() == (0.0, [])
    assert max(json.loads(frame.note)["lead"] for frame in server.answers.frames) <= staleness


def test_random_orders_keep_the_bound() -> None:
    server = ShelfByHand("ssp(staleness=2) / parameter_server", 4)
    pushed = [0] * 4
    choices = torch.randint(4, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    for rank in choices:
        if len(server.answers.to(rank)) == pushed[rank]:  # it has been answered, so it may go on
            assert pushed[rank] - min(pushed) <= 2
            server.push(rank, gradient(pushed[rank], rank), pushed[rank])
            pushed[rank] += 1
    assert min(pushed) > 20, "nobody is held up for ever"


def test_nobody_waits_for_a_worker_that_rests_or_has_left() -> None:
    server = ShelfByHand("ssp(staleness=0) / parameter_server", 3)
    server.push(0, gradient(0))
    server.store.leave(1)
    assert not server.answers.frames
    server.store.rest(2)
    assert len(server.answers.to(0)) == 1
    server.push(2, gradient(0, 2))
    assert len(server.answers.to(2)) == 1
    server.push(0, gradient(1), 1)
    assert len(server.answers.to(0)) == 1, "rank 2 pushes again, so it is waited for again"


def test_clocks_start_anew_when_all_have_rested() -> None:
    server = ShelfByHand("ssp(staleness=1) / parameter_server", 2)
    server.push(0, gradient(0))
    server.store.rest(0)
    server.store.rest(1)
    for step in (1, 2):
        server.push(1, gradient(step, 1), step)
    assert len(server.answers.to(1)) == 1, "one step ahead, not as many as rank 0 made before"


def test_an_optimizer_with_groups_follows_the_worker_step_by_step() -> None:
    groups = [{**ADAMW, "lr": 0.1}, {**ADAMW, "lr": 0.01, "weight_decay": 0.5, "betas": (0.5, 0.9)}]
    server = ShelfByHand(
        "asp(learning_rate=full) / parameter_server", 1, optimizer="AdamW", groups=groups, group_of={"b": 1}
    )
    a, b = (nn.Parameter(part.clone()) for part in server.start.split([6, 5]))
    theirs = torch.optim.AdamW(
        [{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.01, "weight_decay": 0.5, "betas": (0.5, 0.9)}]
    )
    for step in range(8):
        for place, group in enumerate(theirs.param_groups):
            group["lr"] *= 0.9
            server.groups[place] = {**server.groups[place], "lr": group["lr"], "initial_lr": 0.1}
        a.grad, b.grad = gradient(step).split([6, 5])
        theirs.step()
        server.push(0, gradient(step), step)
        torch.testing.assert_close(server.values(), torch.cat([a, b]).detach(), rtol=0, atol=1e-6)
    kept = server.store.state()
    assert torch.equal(kept["b|step|0"], torch.tensor([8.0]))
    torch.testing.assert_close(kept["a|exp_avg|2"], theirs.state[a]["exp_avg"], rtol=0, atol=1e-6)


def test_a_parameter_without_gradient_stays_and_so_does_its_optimizer_state() -> None:
    server = ShelfByHand("asp / parameter_server", 1, optimizer="AdamW", groups=[ADAMW])
    server.push(0, torch.cat([gradient(0)[:6], torch.zeros(5)]), unused=[1])
    assert torch.equal(server.values()[6:], server.start[6:]), "no weight decay either"
    assert not torch.equal(server.values()[:6], server.start[:6])
    assert not any(key.startswith("b|") for key in server.store.state())


def test_a_parameter_that_is_in_no_group_is_held_but_never_moved() -> None:
    server = ShelfByHand("asp / parameter_server", 1, group_of={"b": -1})
    server.push(0, gradient(0))
    assert torch.equal(server.values()[6:], server.start[6:])
    assert not torch.equal(server.values()[:6], server.start[:6])
    nothing = ShelfByHand("asp / parameter_server", 1, group_of={"a": -1, "b": -1})
    nothing.push(0, gradient(0))
    assert torch.equal(nothing.values(), nothing.start)


def test_state_survives_field_by_field() -> None:
    one, other = (
        ShelfByHand("asp / parameter_server", 1, optimizer="AdamW", groups=[{**ADAMW, "amsgrad": True}]) for _ in "12"
    )
    for step in range(3):
        one.push(0, gradient(step), step)
    saved = one.store.state()
    assert {key.split("|")[1] for key in saved} == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    other.store.restore((one.values(), *saved.values()), list(saved))
    for step in range(3, 6):
        one.push(0, gradient(step), step)
        other.push(0, gradient(step), step)
        assert torch.equal(one.values(), other.values())
    for key, value in one.store.state().items():
        assert torch.equal(value, other.store.state()[key])


NOTE = {"step": 0, "groups": [SGD], "unused": []}
GARBAGE = {
    "no JSON": "{",
    "no table": "[1]",
    "no step": json.dumps({**NOTE, "step": None}),
    "a step below zero": json.dumps({**NOTE, "step": -1}),
    "no groups": json.dumps({**NOTE, "groups": None}),
    "too many groups": json.dumps({**NOTE, "groups": [SGD, SGD]}),
    "a group that is no table": json.dumps({**NOTE, "groups": [7]}),
    "no learning rate": json.dumps({**NOTE, "groups": [{}]}),
    "a learning rate in words": json.dumps({**NOTE, "groups": [{**SGD, "lr": "fast"}]}),
    "a learning rate that is no number": json.dumps({**NOTE, "groups": [{**SGD, "lr": float("nan")}]}),
    "a list as momentum": json.dumps({**NOTE, "groups": [{**SGD, "momentum": [1, 2]}]}),
    "a number as nesterov": json.dumps({**NOTE, "groups": [{**SGD, "nesterov": 2.5}]}),
    "unused parameters in words": json.dumps({**NOTE, "unused": ["a"]}),
}


@pytest.mark.parametrize("note", GARBAGE.values(), ids=GARBAGE.keys())
def test_notes_that_make_no_sense_change_nothing(note: str) -> None:
    server, twin = (ShelfByHand("asp / parameter_server", 2) for _ in "12")
    with pytest.raises(CommunicationError):
        server.push(1, gradient(0), note=note)
    assert torch.equal(server.values(), server.start)
    for one in (server, twin):
        one.push(0, gradient(1), 1)
    assert torch.equal(server.values(), twin.values())


@pytest.mark.parametrize("compression", ["none", "int8", "topk(0.3)", "fp16"])
def test_payloads_of_the_wrong_size_change_nothing(compression: str) -> None:
    server = ShelfByHand(f"asp / parameter_server / {compression}", 2)
    for tensors in [(), (torch.ones(3),), (torch.ones(BUCKET.numel, dtype=torch.float64),), (torch.ones(1),) * 40]:
        with pytest.raises(CommunicationError, match="a payload of rank 1 has"):
            server.store.push(Frame(PUSH, 1, 0, 0, json.dumps(NOTE), tensors), server.answers)
    assert torch.equal(server.values(), server.start)


def test_states_that_do_not_fit_change_nothing() -> None:
    server = ShelfByHand("asp / parameter_server", 1, optimizer="AdamW", groups=[ADAMW])
    server.push(0, gradient(0))
    values, saved = server.values(), server.store.state()
    for tensors, keys in (
        ((torch.ones(10),), []),
        ((torch.ones(11),), ["a|exp_avg|2"]),
        ((torch.ones(11), torch.ones(5)), ["a|exp_avg|2"]),
        ((torch.ones(11), torch.ones(2)), ["a|step|0"]),
        ((torch.ones(11), torch.ones(1)), ["c|step|0"]),
        ((torch.ones(11, dtype=torch.float64),), []),
    ):
        with pytest.raises(CommunicationError):
            server.store.restore(tensors, keys)
    assert torch.equal(server.values(), values)
    assert all(torch.equal(value, saved[key]) for key, value in server.store.state().items())


def test_a_worker_that_does_not_wait_for_its_answer_is_refused() -> None:
    server = ShelfByHand("ssp(staleness=0) / parameter_server", 2)
    server.push(0, gradient(0))
    with pytest.raises(CommunicationError, match="rank 0 pushes again before its last push was answered"):
        server.push(0, gradient(1), 1)
