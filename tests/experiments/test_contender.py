"""Contenders: a rehearsal leaves no trace, a turn counts all it sends, and inside nothing waits for the device."""

from __future__ import annotations

import pytest

from tests.experiments.contest_ranks import COMPILING_S, OUTLASTING_S, FakeDevice
from tests.processes import run_processes

RANKS = "tests.experiments.contest_ranks"
STRATEGIES = [
    "torch DDP",
    "torch DDP + PowerSGD hook",
    "bsp / all_reduce / int4(rounding=stochastic) + error_feedback / wfbp",
    "powersgd",
    "bsp / parameter_server / int8 + error_feedback / wfbp",
    "dear",
    "diloco(period=2) / all_reduce / int8 + error_feedback / sequential",
    "streaming_diloco(period=4, fragments=2, overlap=1) / all_reduce / none / sequential",
    "demo",
    "delayed / all_reduce / int8 / sequential",
]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(150)
def test_a_rehearsal_changes_no_loss_and_records_nothing() -> None:
    arguments = {"strategies": STRATEGIES, "steps": 6}
    found = run_processes(f"{RANKS}:rehearsed_and_not", world_size=2, arguments=arguments, timeout_s=140)
    for strategy, (plain, rehearsed) in found[0].value.items():
        assert rehearsed == plain, strategy
        assert plain[0] != plain[-1], strategy


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(90)
def test_time_to_compile_is_no_training_time() -> None:
    cold, warm = (
        run_processes(f"{RANKS}:compiling", world_size=2, arguments={"rehearses": rehearses}, timeout_s=40)[0].value
        for rehearses in (False, True)
    )
    assert cold[0] > COMPILING_S
    assert max(warm) < COMPILING_S


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(60)
def test_exchanges_in_flight_at_the_end_of_a_turn_count() -> None:
    for rank in run_processes(f"{RANKS}:outlasting", world_size=2, timeout_s=50):
        (alone,), (first, *_, last) = rank.value
        assert alone > OUTLASTING_S, "a turn of one step"
        assert last > OUTLASTING_S
        assert first < OUTLASTING_S, "its exchange runs while the next step computes"


@pytest.mark.dist
@pytest.mark.timeout(60)
def test_nothing_waits_for_the_device_inside_a_turn() -> None:
    (rank,) = run_processes(f"{RANKS}:behind_the_host", world_size=1, timeout_s=50)
    found = rank.value
    assert found["waits"] == 2, "before the first step and after the last"
    assert found["wall_s"] == found["seconds"] <= found["took_s"], "the host's clock, from idle to idle"
    for kind, parts in (("alone", 1), ("forward", 1), ("backward", 1), ("optimizer", 1), ("iteration", 3)):
        durations_s = found["durations_s"][kind]
        assert len(durations_s) == (1 if kind == "alone" else 4)
        assert min(durations_s) > parts * FakeDevice.STEP_S * 0.99, "as the device tells"
    assert len(set(found["losses"])) == 4
