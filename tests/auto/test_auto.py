"""attach(..., "auto"): what it accepts, what it decides by what it sees, and that all ranks follow."""

from __future__ import annotations

import copy
import inspect
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import laconic
from laconic.auto.choose import as_steps_say, choose, read_question, suits
from laconic.auto.controller import Controller
from laconic.auto.decisions import FEWEST_STEPS, REST_STEPS, WINDOW_STEPS, Lead, window_steps
from laconic.auto.planning import Decision, Findings, InChildProcess, Option
from laconic.auto.settings import read_auto
from laconic.cluster import Cluster, Link
from laconic.errors import AttachError, CheckpointError, LaconicError
from laconic.planner import Question
from laconic.planner.choice import Judge
from laconic.strategy import Strategy
from laconic.workload import Layer, TensorShape, Workload
from tests.auto.ranks import DDP, LOCAL, TOPK, Scripted, chosen
from tests.processes import run_processes
from tests.runtime.replicas import assert_equal


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("strategy", "keeps"),
    [
        (TOPK, True),
        (TOPK, False),
        (LOCAL, True),
    ],
)
def test_all_ranks_adopt_one_plan_as_if_changed_by_hand(strategy: str, keeps: bool) -> None:
    asked = {"strategy": strategy, "keeps": keeps}
    results = run_processes("tests.auto.ranks:adopts_a_plan", world_size=2, arguments=asked, timeout_s=110)
    first = results[0].value
    for result in results:
        value = result.value
        assert_equal(value["auto"], value["by_hand"])
        assert_equal(value["auto"], first["auto"])
        assert value["changes"] == first["changes"]
        assert value["told"] == first["told"]
        assert value["counted"] == list(range(100)), "every step is counted once"
        assert "sharded model" in value["refused"][0]
        assert "DistributedDataParallel" in value["refused"][1]
    stays = keeps and strategy == TOPK  # replicas that train alone become one model after the last step
    texts = [str(Strategy.parse(text)) for text in (strategy, DDP)]
    assert [strategy for _, strategy in first["changes"]] == texts[: 1 if stays else 2]
    assert first["ends"] == texts[0 if stays else 1]
    planned_at = 3 * WINDOW_STEPS + FEWEST_STEPS
    assert first["changes"][0][0] == planned_at, "nothing, DDP's steps, layers, then the plan"
    after = "The last step was made" if keeps else "As measured it gains nothing clear"
    assert first["told"][0][2] == "Because."
    assert stays or first["told"][1][2].startswith(after)
    assert first["changes"][-1][0] == (100 if keeps and not stays else first["told"][-1][0])
    assert len(first["lines"]) == len(first["told"]), "a line for each decision"
    assert not results[1].value["lines"], "from rank 0 alone"
    # What the planner was asked: every parameter, in the order of the forward pass, and both ranks.
    assert first["layers"][0] == "(between steps)"
    assert sorted(first["layers"][1:]) == sorted(["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"])
    assert first["layers"][-1].startswith("3.")
    assert first["layers"][1].startswith("0.")
    assert first["compute_s"] > 0
    assert first["hosts"] == 2


# -- what rank 0 decides by ------------------------------------------------------------------------------------


class Course:
    """Windows of steps, one after the other; the layers are not watched, as planners here do not look at them."""

    def __init__(self, *decisions: Decision | str | None) -> None:
        self.planner = Scripted(*decisions)
        self.lead = Lead(self.planner)
        self.strategy = Strategy()
        self.orders: list[str] = []
        self.steps = FEWEST_STEPS
        """Steps until the next order."""
        self.made = 0
        """All steps so far."""

    def windows(self, *windows_s: float | list[float]) -> list[str]:
        """What rank 0 orders after each window: of equal steps, or of those given."""
        before = len(self.orders)
        for window_s in windows_s:
            times_s = window_s if isinstance(window_s, list) else [window_s] * self.steps
            order = self.lead.next(times_s, self.strategy)
            self.orders.append(order.do)
            self.steps = order.steps
            self.made += len(times_s)
            if order.do == "measure":
                self.lead.search(findings(1e9))
            if order.do == "use":
                self.strategy = Strategy.parse(order.strategy)
        return self.orders[before:]


def test_a_strategy_that_is_not_clearly_faster_is_left() -> None:
    faster, slower, close = (Course(chosen(TOPK, steps_ratio=1.0)) for _ in range(3))
    for course in (faster, slower, close):
        assert course.windows(1.5, 1.0, 1.0, 1.0) == ["", "watch", "measure", "use"]
        assert str(course.strategy) == str(Strategy.parse(TOPK))
    assert faster.windows(9.0, 0.5, 0.5, 0.5) == ["", "", "", ""], "the first steps after a change do not count"
    assert slower.windows(1.0, 1.2, 1.2) == ["", "", "use"]
    assert slower.strategy == Strategy()
    assert close.windows(0.9, 0.985, 0.985) == ["", "", "use"], "less than 2% is no clear gain"
    lossy = Course(chosen(TOPK, steps_ratio=1.5))
    lossy.windows(1.0, 1.0, 1.0, 1.0)
    assert lossy.windows(0.8, 0.8, 0.8) == ["", "", "use"], "0.8 of the step, 1.5 times the steps"


def test_what_is_predicted_to_be_faster_than_the_first_was_measured_to_be_is_tried_too() -> None:
    others = (Option("ddp-bf16", 0.6), Option("bsp / all_reduce / terngrad", 0.79))
    for second_s, used in ((0.7, "ddp-bf16"), (0.9, TOPK)):
        course = Course(replace(chosen(TOPK, steps_ratio=1.0), others=others))
        course.windows(1.0, 1.0, 1.0, 1.0)
        assert course.windows(0.8, 0.8, 0.8) == ["", "", "use"], "0.1 s had been predicted"
        assert str(course.strategy) == str(Strategy.parse("ddp-bf16"))
        course.windows(second_s, second_s, second_s)
        assert str(course.strategy) == str(Strategy.parse(used)), "terngrad would gain less than 2%"
        assert set(course.windows(*[min(second_s, 0.8)] * 9)) == {""}
        assert course.lead.given_up == ()
    none_gains = Course(replace(chosen(TOPK, steps_ratio=1.0), others=others))
    none_gains.windows(1.0, 1.0, 1.0, 1.0, 1.2, 1.2, 1.2, 1.3, 1.3, 1.3, 1.4, 1.4, 1.4)
    assert none_gains.strategy == Strategy()
    tried = [TOPK, "ddp-bf16", "bsp / all_reduce / terngrad"]
    assert none_gains.lead.given_up == tuple(str(Strategy.parse(text)) for text in tried)


def test_long_steps_are_judged_by_fewer_of_them() -> None:
    assert [window_steps(step_s) for step_s in (0.0, 0.1, 0.5, 0.7, 1.0, 6.3)] == [10, 10, 10, 7, 5, 4]
    for step_s, first, planned_at in ((0.1, [4, 16, 10, 4], 34), (0.7, [4, 10, 7, 4], 25), (6.3, [4] * 4, 16)):
        course = Course(chosen(TOPK, steps_ratio=1.0))
        made: list[int] = []
        for _ in first:
            made.append(course.steps)
            course.windows(step_s)
        assert course.strategy == Strategy.parse(TOPK)
        assert (made, course.made) == (first, planned_at), "to warm up, of DDP, of layers, and to wait for the plan"
    # One of the first steps compiles the model: it says nothing about the length of a window.
    compiles = Course()
    compiles.windows([40.0, 0.1, 0.1])
    assert compiles.steps == 2 * WINDOW_STEPS - FEWEST_STEPS
    # An evaluation between two steps does not either.
    compiles.windows([9.0, *[0.1] * 15])
    assert compiles.lead.seen == (str(Strategy()), 0.1)


def test_where_few_steps_exchange_whole_cycles_are_judged() -> None:
    """Three of four steps are short. Their median would be a gain; with the fourth they take as long as DDP's."""
    cycle = [0.05, 0.05, 0.05, 0.25]
    course = Course(chosen(LOCAL, steps_ratio=1.0))
    course.windows(0.1, 0.1, 0.1, 0.1)
    assert str(course.strategy) == str(Strategy.parse(LOCAL))
    steps = cycle * 15
    windows = [steps[number : number + 10] for number in range(0, len(steps), 10)]
    assert course.windows(*windows) == ["", "", "", "", "", "use"], "to settle, then twice three cycles, 20 steps each"
    assert course.strategy == Strategy()
    gains = Course(chosen(LOCAL, steps_ratio=1.0))
    gains.windows(0.1, 0.1, 0.1, 0.1)
    assert set(gains.windows(*[[time_s - 0.01 for time_s in window] for window in windows] * 5)) == {""}
    assert str(gains.strategy) == str(Strategy.parse(LOCAL))


def test_one_long_round_is_chance_where_steps_are_long_too() -> None:
    """A window has four steps here, so a cycle of eight is as long as two of them, but it is looked at as one."""
    local = Strategy.parse("local_sgd(period=8) / all_reduce / none / fusion")
    course = Course(chosen(str(local), steps_ratio=1.0))
    course.windows(2.0, 2.0, 2.0, 2.0)
    assert course.strategy == local
    assert set(course.windows([9.0] * 4, [1.5] * 4)) == {""}, "the first cycle also pays for the change"
    assert set(course.windows(*[[1.5] * 4] * 8)) == {""}
    assert course.strategy == local
    assert set(course.windows(*[[1.5] * 4] * 12)) == {""}
    assert "measure" not in course.windows([1.5, 1.5, 1.5, 9.0], *[[1.5] * 4] * 5), "a checkpoint was saved"


def test_gradients_that_are_owed_are_sent_before_replicas_train_alone() -> None:
    course = Course(chosen(TOPK, steps_ratio=1.0), chosen(LOCAL, steps_ratio=1.0))
    course.windows(1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, *[0.5] * 5)
    assert course.windows(5.0, 5.0, 5.0) == ["watch", "measure", "use"]
    assert course.strategy == Strategy()
    assert course.windows(9.0) == ["use"]
    assert str(course.strategy) == str(Strategy.parse(LOCAL))


def test_a_strategy_that_is_refused_is_not_planned_again() -> None:
    course = Course(chosen(TOPK, steps_ratio=1.0), chosen(DDP, steps_ratio=1.0))
    assert course.windows(1.0, 1.0, 1.0, 1.0)[-1] == "use"
    course.lead.refused(str(Strategy.parse(TOPK)))
    course.strategy = Strategy()
    assert course.windows(1.0, 1.0) == ["watch", "measure"]
    assert course.lead.given_up == (str(Strategy.parse(TOPK)),)


def test_steps_that_change_make_it_plan_again_and_noise_does_not() -> None:
    predicted = replace(chosen(DDP, steps_ratio=1.0), ddp_step_s=0.9)
    course = Course(chosen(TOPK, steps_ratio=1.0), predicted)
    course.windows(1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5)
    assert "measure" not in course.windows(*[0.5, 0.6, 0.45, 2.0] * 5), "one odd window is chance"
    assert course.windows(0.5, 0.5) == ["unwatch", ""]
    changed_at = course.made
    assert course.windows(1.0, 1.0) == ["watch", "measure"]
    assert course.lead.seen == (str(Strategy.parse(TOPK)), 1.0), "DDP's steps are not known on these links"
    assert course.windows(1.0) == ["use"]
    assert course.strategy == Strategy()
    assert course.made - changed_at <= 30
    assert course.windows(0.9, 0.9) == ["", ""]
    decided_at = course.made
    while course.made + course.steps < decided_at + REST_STEPS:
        assert course.windows(1.3) == [""], "not again at once"
    clear = Course(chosen(TOPK, steps_ratio=1.0), predicted)
    clear.windows(1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5)
    assert clear.windows(0.9, 0.9) == ["watch", "measure"], "unless it is clear: 80% longer"
    unclear = Course(chosen(TOPK, steps_ratio=1.0), predicted)
    unclear.windows(1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5)
    assert unclear.windows(0.7, 0.7, 0.7) == ["", "", ""], "40% longer"


def test_where_watching_makes_steps_longer_it_begins_when_they_have_changed() -> None:
    course = Course(chosen(TOPK, steps_ratio=1.0), chosen(DDP, steps_ratio=1.0))
    course.lead.watches_freely = False
    course.windows(1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, *[0.5] * 20)
    assert course.windows(2.0, 0.5, 0.5) == ["", "", ""], "one odd window is chance"
    assert course.windows(2.0, 2.0, 2.0, 2.0) == ["", "watch", "measure", "use"]


def test_links_that_change_while_a_plan_is_made_or_tried_make_it_plan_again() -> None:
    noisy = Course(None, chosen(TOPK, steps_ratio=1.0))
    assert noisy.windows(0.1, 0.1, 0.1, 0.3, 0.3)[-1] == "use", "eight short steps are chance"
    searching = Course(None, chosen(TOPK, steps_ratio=1.0))
    assert searching.windows(1.0, 1.0, 1.0, 5.0, 5.0) == ["", "watch", "measure", "", "watch"]
    assert searching.strategy == Strategy(), "the answer was one for other links"
    trying = Course(chosen(TOPK, steps_ratio=1.0))
    assert trying.windows(1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0)[-1] == "use", "back to DDP, whose steps were shorter"
    assert trying.windows(5.0, 5.0) == ["", "watch"], "but are no longer"
    assert trying.lead.given_up == ()
    surprised = Course(chosen(TOPK, steps_ratio=1.0), replace(chosen(DDP, steps_ratio=1.0), ddp_step_s=0.2))
    surprised.windows(1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, *[0.5] * 5)
    assert surprised.windows(2.0, 2.0, 2.0, 2.0, 2.0) == ["watch", "measure", "use", "", "watch"], (
        "DDP was to take 0.2 s on these links and takes 2 s"
    )
    quiet = Course(chosen(TOPK, steps_ratio=1.0))
    quiet.windows(1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0)
    assert set(quiet.windows(*[1.0] * 20)) == {""}


def test_after_the_last_step_nothing_is_decided_even_if_an_earlier_state_is_loaded() -> None:
    def one_rank(transport: laconic.Transport) -> int:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with laconic.attach(model, optimizer, "ddp", transport=transport) as session:
            planner = Scripted(chosen(TOPK, steps_ratio=1.0))
            Controller(session, planner, total_steps=22).begin()
            before, replica = session.state_dict(), copy.deepcopy(model.state_dict())
            for step in range(60):
                if step == 22:
                    model.load_state_dict(replica)
                    session.load_state_dict(before)
                model(torch.ones(2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return len(planner.asked)

    assert laconic.InProcessCluster(2, timeout_s=20).run(one_rank) == [0, 0]


@pytest.mark.parametrize("strategy", ["bsp / all_reduce / int8 + error_feedback / fusion", LOCAL])
def test_a_state_of_another_strategy_is_handed_over_to_the_first_one(strategy: str) -> None:
    def one_rank(transport: laconic.Transport) -> dict[str, object]:
        def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
            seed = 10 * number + transport.rank
            inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        def make() -> tuple[nn.Module, torch.optim.Optimizer]:
            model = nn.Linear(3, 2)
            return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        by_hand, optimizer = make()
        with laconic.attach(by_hand, optimizer, "auto", transport=transport) as session:
            session.change_strategy(strategy)
            for number in range(5):
                step(by_hand, optimizer, number)
            saved = session.state_dict()
            replica = copy.deepcopy((by_hand.state_dict(), optimizer.state_dict()))
            session.change_strategy("ddp")
            step(by_hand, optimizer, 5)

        resumed, optimizer = make()
        with laconic.attach(resumed, optimizer, "auto", transport=transport) as session:
            resumed.load_state_dict(replica[0])
            optimizer.load_state_dict(replica[1])
            with pytest.raises(CheckpointError, match="not a laconic session state"):
                session.load_state_dict({"strategy": saved["strategy"], "format": saved["format"]})
            resumed.load_state_dict(replica[0])
            optimizer.load_state_dict(replica[1])
            session.load_state_dict(saved)
            assert (session.step, str(session.strategy)) == (5, str(Strategy()))
            step(resumed, optimizer, 5)
        return {"by hand": by_hand.state_dict(), "resumed": resumed.state_dict()}

    results = laconic.InProcessCluster(2, timeout_s=20).run(one_rank)
    for found in results:
        assert_equal(found["by hand"], found["resumed"])
        assert_equal(found["by hand"], results[0]["by hand"])


def test_without_an_answer_training_goes_on_as_it_was() -> None:
    course = Course("the planner has ended with 1: boom")
    assert course.windows(1.0, 1.0, 1.0, 1.0)[-1] == "use"
    assert course.strategy == Strategy()


# -- what is chosen --------------------------------------------------------------------------------------------


def findings(bandwidth_bps: float) -> Findings:
    tensors = [TensorShape(name=f"{number}.weight", shape=(512, 1024)) for number in range(6)]
    layers = tuple(Layer(name=one.name, forward_s=5e-3, backward_s=1e-2, tensors=(one,)) for one in tensors)
    return Findings(
        workload=Workload(name="m", batch=1, layers=layers, source="made up"),
        cluster=Cluster.uniform(4, Link(bandwidth_bps=bandwidth_bps)),
        device="cpu",
    )


def asked(bandwidth_bps: float, **settings: object) -> dict[str, object]:
    usual = {"max_loss_gap": None, "task": "text", "total_steps": None}
    return {**findings(bandwidth_bps).to_table(), **usual, **settings}


def test_only_what_a_script_for_ddp_can_run_is_chosen() -> None:
    slow = choose(asked(1e8, max_loss_gap=0.2, total_steps=10_000))
    assert suits(Strategy.parse(slow.best.strategy), None)
    assert Strategy.parse(slow.best.strategy).compression.name != "none"
    assert slow.best.cost_s < slow.ddp_step_s
    assert slow.reason.startswith("Use ")
    exact = choose(asked(1e8))
    assert Strategy.parse(exact.best.strategy).compression.name == "none", "no gap was allowed"
    assert choose(asked(1e12, max_loss_gap=0.2, total_steps=10_000)).best.strategy == DDP
    again = choose(asked(1e8, max_loss_gap=0.2, total_steps=10_000, given_up=[slow.best.strategy]))
    assert again.best.strategy != slow.best.strategy
    for text in ("dear", "demo-int4", "bsp / parameter_server", "bsp / sharded / none", "onebit-adam", "d-psgd"):
        assert not suits(Strategy.parse(text), 10_000), text


def test_replicas_may_train_alone_where_the_end_of_training_is_known() -> None:
    diloco = Strategy.parse("diloco(period=32)")
    assert suits(diloco, 10_000)
    assert not suits(diloco, None)
    assert not suits(diloco, 100), "too few rounds are left"
    allowed = {"max_loss_gap": 0.2, "total_steps": 10_000}
    alone = choose(asked(1e7, **allowed, steps_left=10_000))
    assert not Strategy.parse(alone.best.strategy).exchanges_gradients()
    assert Strategy.parse(choose(asked(1e7, **allowed)).best.strategy).exchanges_gradients()
    assert Strategy.parse(choose(asked(1e7, **allowed, steps_left=100)).best.strategy).exchanges_gradients()
    strict = choose(asked(1e7, max_loss_gap=0.0, total_steps=10_000, steps_left=10_000))
    assert Strategy.parse(strict.best.strategy).exchanges_gradients(), "no loss is allowed"
    without = choose(asked(1e7, **allowed, steps_left=10_000, free_bytes=1000))
    assert Strategy.parse(without.best.strategy).state_bytes(findings(1e7).workload.tensors) <= 1000


@pytest.mark.parametrize("probed_bps", [1e6, 1e9])
@pytest.mark.parametrize("text", [DDP, "bsp / all_reduce / int8"])
def test_where_steps_disagree_with_a_probe_they_are_believed(text: str, probed_bps: float) -> None:
    strategy = Strategy.parse(text)

    def step_s(asked: Question) -> float:
        found = Judge(asked).choice(strategy)
        assert not isinstance(found, str)
        return found.step_s

    true, wrong = (read_question(asked(bandwidth_bps, max_loss_gap=0.2)) for bandwidth_bps in (3e7, probed_bps))
    found = as_steps_say(wrong, strategy, step_s(true))
    assert found.setting.cluster.links[0].bandwidth_bps == pytest.approx(3e7, rel=0.05)
    assert as_steps_say(true, strategy, 1.1 * step_s(true)) is true, "close enough"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_search_runs_in_a_process_of_its_own() -> None:
    planner = InChildProcess(max_loss_gap=None, task="text", total_steps=None)
    for prepares in (True, False):
        if prepares:
            planner.prepare()
            time.sleep(1.0)
        search = planner.start(findings(1e12))
        until_s = time.monotonic() + 55
        while (found := search.decision()) is None and time.monotonic() < until_s:
            time.sleep(0.05)
        search.stop()
        assert isinstance(found, Decision), found
        assert found.best.strategy == DDP


def test_a_planner_that_cannot_be_started_does_not_end_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refused)
    planner = InChildProcess(max_loss_gap=None, task="text", total_steps=None)
    planner.prepare()
    search = planner.start(findings(1e12))
    assert search.decision() == "the planner could not be started: no more processes"
    search.stop()
    planner.stop()


def test_a_process_that_is_not_asked_or_dies_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    planner = InChildProcess(max_loss_gap=None, task="text", total_steps=None)
    planner.prepare()
    ready = planner._ready
    planner.prepare()
    assert planner._ready is ready, "one is enough"
    planner.stop()
    planner.stop()
    assert list(tmp_path.iterdir()) == []
    planner.prepare()
    assert planner._ready is not None
    planner._ready._process.kill()
    planner._ready._process.wait()
    search = planner.start(findings(1e12))
    assert "ended with -9" in str(search.decision())
    search.stop()
    assert list(tmp_path.iterdir()) == []


# -- what attach accepts ---------------------------------------------------------------------------------------


def test_text_and_object_say_the_same() -> None:
    assert read_auto("auto") == laconic.Auto()
    made = read_auto("auto(max_loss_gap=1%, total_steps=500)")
    assert made == laconic.Auto(max_loss_gap=0.01, total_steps=500)
    assert read_auto(str(made)) == made
    assert read_auto("ddp") == "ddp"
    assert "strategy" in inspect.signature(laconic.attach).parameters


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("auto(max_loss_gap=0.01)", {}, "needs total_steps"),
        ("auto(max_loss_gap=2)", {"total_steps": 10}, "share from 0 to 1"),
        ("auto(total_steps=10)", {"total_steps": 20}, "Give it once"),
        ("auto(total_steps=many)", {}, "whole number"),
        ("auto(max_loss_gap=1%, task=other)", {"total_steps": 9}, "has no effect with task"),
        ("auto(task=sums)", {}, '"text" or "other"'),
        ("auto / all_reduce", {}, "cannot be combined"),
        ("auto(max_gap=1%)", {}, "no such setting"),
        ("auto", {"elastic": laconic.Elastic(max_ranks=2)}, "Leave elastic out"),
    ],
)
def test_errors(text: str, options: dict[str, object], message: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(LaconicError, match=message):
        laconic.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), text, **options)
    assert not model._forward_pre_hooks


def test_ranks_that_disagree_and_join_are_refused() -> None:
    def one_rank(transport: laconic.Transport) -> str:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(AttachError) as refused:
            laconic.attach(model, optimizer, "auto" if transport.rank else "ddp", transport=transport)
        session = laconic.attach(model, optimizer, "auto", transport=transport)
        with session, pytest.raises(AttachError, match="does not work with"):
            session.join()
        return str(refused.value)

    for said in laconic.InProcessCluster(2, timeout_s=20).run(one_rank):
        assert "ranks attach different things: strategy" in said
