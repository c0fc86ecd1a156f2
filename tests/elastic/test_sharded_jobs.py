"""Sharded models: the ranks of a replica leave and join together, and a replay in one process has the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.elastic.families import SHARDED_FAMILIES
from benchmarks.elastic.job import Outcome, run_job
from benchmarks.elastic.replay_sharded import replay_sharded

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]
FUSION, DILOCO = SHARDED_FAMILIES["sharded"], SHARDED_FAMILIES["sharded-diloco"]
WORKERS = "tests.elastic.sharded_workers"


def _said(folder: Path) -> str:
    return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(folder.glob("*.out")))


def _check(outcome: Outcome, folder: Path) -> None:
    assert not outcome.hung, _said(folder)
    assert not outcome.error, f"{outcome.error}\n{_said(folder)}"
    assert not outcome.log.conflicts
    assert not outcome.log.differing
    for members in outcome.log.views.values():
        assert len(members) % 2 == 0
        numbers = [int(name.partition(".")[2]) for name in members]
        assert all(number % 2 == place % 2 for place, number in enumerate(numbers))
        assert all(number // 2 == numbers[place // 2 * 2] // 2 for place, number in enumerate(numbers))


def _replay(strategy: str, outcome: Outcome, folder: Path) -> int:
    """The number of samples that are missing from steps."""
    _check(outcome, folder)
    replayed = replay_sharded(strategy, outcome.log)
    assert replayed.num_compared == len(outcome.log.digests) > 0
    assert replayed.num_differing == 0
    assert replayed.used_twice == 0
    return replayed.skipped


@pytest.mark.slow
def test_training_goes_on_when_replicas_die_join_and_leave(tmp_path: Path) -> None:
    target = "benchmarks.elastic.sharded_worker:train"
    outcome = run_job(FUSION, tmp_path, kills=2, leaves=1, gap_s=2.0, target=target, ranks_per_replica=2)
    _replay(FUSION, outcome, tmp_path)
    assert len(outcome.log.views) >= 4
    (leaving,) = set(outcome.log.leaving.values())
    assert len(leaving) == 2


@pytest.mark.slow
def test_rounds_of_local_updates_go_on(tmp_path: Path) -> None:
    target = "benchmarks.elastic.sharded_worker:train"
    outcome = run_job(DILOCO, tmp_path, kills=2, leaves=1, gap_s=2.0, seed=1, target=target, ranks_per_replica=2)
    _check(outcome, tmp_path)
    assert len(outcome.log.views) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["the vote", "a vote for a change", "before the vote"])
def test_a_rank_that_loses_the_view_takes_the_others_of_its_replica_along(moment: str, tmp_path: Path) -> None:
    """Otherwise one rank would wait in the next forward pass, and the other for the next view, forever."""
    target, arguments = f"{WORKERS}:one_rank_of_a_replica_loses_the_view", {"moment": moment}
    outcome = run_job(FUSION, tmp_path, target=target, arguments=arguments, ranks_per_replica=2)
    assert _replay(FUSION, outcome, tmp_path) == 0
    redone = moment == "before the vote"
    assert [unit.view for unit in outcome.log.units[5:8]] == ([0, 1, 1] if redone else [0, 0, 1])
    assert len(outcome.log.units) == 20


@pytest.mark.slow
def test_a_rank_that_cannot_connect_when_others_leave(tmp_path: Path) -> None:
    target = f"{WORKERS}:one_rank_cannot_connect_when_others_leave"
    outcome = run_job(FUSION, tmp_path, leaves=1, target=target, until="broken", ranks_per_replica=2)
    _replay(FUSION, outcome, tmp_path)


@pytest.mark.slow
def test_a_replica_joins_when_all_its_ranks_have_the_state(tmp_path: Path) -> None:
    target = f"{WORKERS}:one_rank_of_a_joining_replica_misses_the_state"
    outcome = run_job(FUSION, tmp_path, kills=1, target=target, until="broken", ranks_per_replica=2)
    _replay(FUSION, outcome, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel", [True, False])
def test_a_replica_is_replaced_with_all_that_it_carries(tensor_parallel: bool, tmp_path: Path) -> None:
    arguments = {"tensor_parallel": tensor_parallel}
    outcome = run_job(FUSION, tmp_path, target=f"{WORKERS}:one_dies", arguments=arguments, ranks_per_replica=2)
    _check(outcome, tmp_path)
    assert [len(members) for members in outcome.log.views.values()] == [6, 4, 6]
    for steps in zip(*([*outcome.log.batches[name].values()] for name in ("0.0", "0.1")), strict=True):
        assert (steps[0] == steps[1]) == tensor_parallel


@pytest.mark.slow
def test_an_error_of_the_script_ends_the_job_and_is_named(tmp_path: Path) -> None:
    outcome = run_job(FUSION, tmp_path, target=f"{WORKERS}:one_rank_raises", ranks_per_replica=2)
    assert "worker 0.3 raised ZeroDivisionError: a mistake in the script" in outcome.error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharded", "batch_size", "words"),
    [
        (False, 96, ("no parameter is sharded", "--ranks-per-replica")),
        (True, 97, ("97", "multiple of 2", "batch_size")),
    ],
)
def test_mistakes_are_named_on_every_rank(
    sharded: bool, batch_size: int, words: tuple[str, ...], tmp_path: Path
) -> None:
    arguments = {"sharded": sharded, "batch_size": batch_size}
    run_job("bsp", tmp_path, target=f"{WORKERS}:refused", arguments=arguments, ranks_per_replica=2)
    said = [path.read_text() for path in tmp_path.glob("*.said")]
    assert len(said) == 6
    assert all(text.startswith("AttachError") and all(word in text for word in words) for text in said), said
