"""Real workers that are killed, join and leave: replicas stay equal, and a replay in one process has the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.elastic.families import FAMILIES
from benchmarks.elastic.job import Outcome, run_job
from benchmarks.elastic.log import events_of
from benchmarks.elastic.replay import Replayed, replay

from laconic.membership import launcher

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]
FUSION, RING = FAMILIES["fusion"], FAMILIES["sequential"]


def _check(strategy: str, outcome: Outcome, folder: Path) -> Replayed:
    said = "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(folder.glob("*.out")))
    assert not outcome.hung, said
    assert not outcome.error, f"{outcome.error}\n{said}"
    assert not outcome.log.conflicts
    assert not outcome.log.differing
    replayed = replay(strategy, outcome.log)
    assert replayed.num_compared == len(outcome.log.digests) > 0
    assert replayed.num_differing == 0
    assert replayed.used_twice == 0
    return replayed


@pytest.mark.slow
def test_training_goes_on_when_ranks_die_join_and_leave(tmp_path: Path) -> None:
    outcome = run_job(FUSION, tmp_path, kills=2, leaves=1)
    _check(FUSION, outcome, tmp_path)
    assert len(outcome.log.views) >= 4
    assert outcome.log.leaving


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        FAMILIES["diloco"],
        FAMILIES["streaming"],
        # Something is in flight after every step.
        "streaming_diloco(period=8, fragments=4, overlap=2) / all_reduce / int4 + error_feedback / fusion",
    ],
)
def test_every_kind_of_strategy_goes_on(strategy: str, tmp_path: Path) -> None:
    outcome = run_job(strategy, tmp_path, kills=1, leaves=1, seed=1)
    _check(strategy, outcome, tmp_path)


def test_a_step_that_some_ranks_have_completed_counts_for_all(tmp_path: Path) -> None:
    outcome = run_job(FUSION, tmp_path, target="tests.elastic.workers:one_misses_the_vote")
    replayed = _check(FUSION, outcome, tmp_path)
    assert [unit.view for unit in outcome.log.units[5:8]] == [0, 0, 1]
    assert len(outcome.log.units) == 24
    assert replayed.skipped == 0


@pytest.mark.slow
def test_a_slow_rank_gets_fewer_samples_and_the_batch_stays_the_same(tmp_path: Path) -> None:
    outcome = run_job(FUSION, tmp_path, kills=1, target="tests.elastic.workers:one_is_slow")
    replayed = _check(FUSION, outcome, tmp_path)
    assert replayed.used_twice == 0
    sizes = [size for steps in outcome.log.batches.values() for _, _, size in steps.values()]
    assert max(steps[0][2] for steps in outcome.log.batches.values() if 0 in steps) == 24
    assert min(sizes) <= 18  # equal parts of four ranks are 24; a tenth of all is 9 or 10


@pytest.mark.slow
def test_a_step_that_every_survivor_has_prepared_counts(tmp_path: Path) -> None:
    outcome = run_job(FUSION, tmp_path, target="tests.elastic.workers:two_die_in_the_vote")
    replayed = _check(FUSION, outcome, tmp_path)
    assert [(unit.view, len(unit.members)) for unit in outcome.log.units[5:7]] == [(0, 4), (1, 2)]
    assert replayed.skipped == 0  # the two that died had sent all they had


def test_all_ranks_divide_samples_among_the_same_ones_if_a_connection_breaks_when_a_rank_joins(tmp_path: Path) -> None:
    outcome = run_job(FUSION, tmp_path, target="tests.elastic.workers:one_misses_a_connection")
    _check(FUSION, outcome, tmp_path)
    joined = max(number for number, (workers, _, _) in outcome.log.joined.items() if number)
    assert outcome.log.views[joined + 1] == outcome.log.views[joined]  # the view after it has the same members


_SLOW = [pytest.param(loop, marks=pytest.mark.slow) for loop in ("own", "measures")]


@pytest.mark.parametrize("loop", ["batches", *_SLOW])
def test_a_joining_rank_takes_over_what_the_loop_does_after_a_step(loop: str, tmp_path: Path) -> None:
    target = "tests.elastic.workers:with_a_scheduler"
    outcome = run_job(FUSION, tmp_path, target=target, arguments={"loop": loop})
    assert not outcome.error, "\n".join(path.read_text()[-1500:] for path in sorted(tmp_path.glob("*.out")))
    assert not outcome.log.differing
    sizes = [len(members) for members in outcome.log.views.values()]
    assert (sizes[0], min(sizes), sizes[-1]) == (4, 2, 4)


def test_an_error_of_the_script_ends_the_job_and_is_named(tmp_path: Path) -> None:
    outcome = run_job(FUSION, tmp_path, target="tests.elastic.workers:one_raises")
    assert "raised ZeroDivisionError: a mistake in the script" in outcome.error
    others = [path.read_text() for path in tmp_path.glob("*.out") if "ZeroDivisionError: a mistake" in path.read_text()]
    assert len(others) == 4  # all of them say why


@pytest.mark.slow
def test_ranks_that_divide_other_samples_are_named(tmp_path: Path) -> None:
    outcome = run_job(FUSION, tmp_path, target="tests.elastic.workers:with_other_samples")
    assert "divides other samples than this one" in outcome.error


def test_rounds_by_time_weight_ranks_by_the_steps_they_made(tmp_path: Path) -> None:
    strategy = "local_sgd(period=1000, seconds=0.2s)"
    outcome = run_job(strategy, tmp_path, target="tests.elastic.workers:rounds_by_time")
    assert not outcome.error, "\n".join(path.read_text()[-1500:] for path in sorted(tmp_path.glob("*.out")))
    assert not outcome.log.conflicts
    assert not outcome.log.differing
    counts: dict[int, dict[str, int]] = {}
    for event in (event for path in tmp_path.glob("*.jsonl") for event in events_of(path)):
        if event.kind == "weights":
            said = zip(
                str(event.data["members"]).split(","), map(int, str(event.data["counts"]).split(",")), strict=True
            )
            known = counts.setdefault(event.step, dict(said))
            assert ",".join(known) == event.data["members"]
    rounds = [unit for unit in outcome.log.units if unit.what.startswith("the round")]
    # Every step moves the parameter by -1, so a mean weighted by steps moves it by -sum n^2 / sum n.
    value = 0.0
    for unit in rounds:
        steps = [counts[unit.step][name] for name in unit.members]
        value -= sum(count**2 for count in steps) / sum(steps)
        assert float(outcome.log.digests[unit.step + 1]) == pytest.approx(value, rel=1e-5)
    assert len(rounds) == 8
    assert len({len(unit.members) for unit in rounds}) > 1  # one has died
    assert any(max(found.values()) > min(found.values()) for found in counts.values())


@pytest.mark.slow
def test_a_rank_that_joins_takes_over_the_scale_of_the_loss_and_both_optimizers(tmp_path: Path) -> None:
    outcome = run_job(FUSION, tmp_path, target="tests.elastic.workers:scaled_loss_and_two_optimizers")
    assert not outcome.error, "\n".join(path.read_text()[-1500:] for path in sorted(tmp_path.glob("*.out")))
    assert not outcome.log.conflicts
    assert not outcome.log.differing
    joined = max(number for number, (workers, _, _) in outcome.log.joined.items() if number)
    assert sum(view == joined for _, view, _ in outcome.log.commits) >= 4  # the one that joined has made steps
    scales = {said.split()[1] for said in outcome.log.digests.values()}
    assert len(scales) > 2
    assert len(outcome.log.units) > len(outcome.log.digests)  # some steps were skipped


@pytest.mark.slow
def test_deaths_of_a_joiner_and_of_its_source_cost_nothing_else(tmp_path: Path) -> None:
    target = "tests.elastic.workers:joiners_die_with_half_the_state"
    outcome = run_job(RING, tmp_path, kills=1, target=target, until="source-died")
    _check(RING, outcome, tmp_path)
    died = (tmp_path / "source-died").read_text()
    later = [members for number, members in outcome.log.views.items() if died not in members and number > 2]
    assert any(len(members) >= 3 for members in later)  # others have joined since


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "how"),
    [
        (RING, "branches_are_left_out"),
        (FUSION, "branches_are_left_out"),
        (FUSION, "branches_are_left_out_and_one_misses_the_vote"),
        (FUSION, "branches_are_left_out_and_one_dies_in_the_vote"),
    ],
)
def test_what_no_rank_has_used_stays_without_gradient(strategy: str, how: str, tmp_path: Path) -> None:
    outcome = run_job(strategy, tmp_path, target=f"tests.elastic.workers:{how}")
    assert not outcome.error, "\n".join(path.read_text()[-1500:] for path in sorted(tmp_path.glob("*.out")))
    assert not outcome.log.conflicts
    assert not outcome.log.differing
    assert max(outcome.log.digests) == 24
    assert len(outcome.log.views) > 1


@pytest.mark.parametrize(
    "what", ["model", *(pytest.param(one, marks=pytest.mark.slow) for one in ("optimizer", "session"))]
)
def test_a_rank_that_joins_must_not_load_a_checkpoint(what: str, tmp_path: Path) -> None:
    target = "tests.elastic.workers:loads_its_checkpoint"
    outcome = run_job("bsp", tmp_path, target=target, arguments={"what": what})
    assert "has joined other ranks after step" in outcome.error
    assert "if session.step == 0" in outcome.error


@pytest.mark.slow
def test_a_script_that_loads_only_where_training_begins_goes_on(tmp_path: Path) -> None:
    target = "tests.elastic.workers:loads_its_checkpoint"
    outcome = run_job("bsp", tmp_path, target=target, arguments={"what": "where training begins"})
    assert not outcome.error, "\n".join(path.read_text()[-1500:] for path in sorted(tmp_path.glob("*.out")))
    assert not outcome.log.differing
    assert any(view and workers for view, (workers, _, _) in outcome.log.joined.items())


def test_a_rank_that_joins_begins_at_the_epoch_of_the_others(tmp_path: Path) -> None:
    outcome = run_job("bsp", tmp_path, target="tests.elastic.workers:a_loop_over_epochs")
    assert not outcome.error, "\n".join(path.read_text()[-1500:] for path in sorted(tmp_path.glob("*.out")))
    assert not outcome.log.differing
    assert any(view and workers for view, (workers, _, _) in outcome.log.joined.items())


def test_a_script_may_go_on_after_training_but_not_attach_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_GRACE_S", 0.3)
    outcome = run_job("bsp", tmp_path, target="tests.elastic.workers:twice_and_an_evaluation")
    assert len([*tmp_path.glob("evaluated.*")]) == 4
    assert "ended with exit code 1" in outcome.error
    assert "has been in an elastic session already" in "".join(path.read_text() for path in tmp_path.glob("*.out"))
