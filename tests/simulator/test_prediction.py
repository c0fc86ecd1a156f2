"""What a simulation tells: why a step takes as long as it does, and the same for programs."""

from __future__ import annotations

import json

import pytest

from laconic.simulator import simulate
from laconic.simulator.prediction import Shared
from laconic.strategy import PRESETS
from tests.simulator.jobs import Line, hosts, job

JOB = job((1.0, 1.0, 2_000_000), (1.0, 1.0, 2_000_000))
SLOW = Line(byte_s=1e-6)


def test_a_step_is_told_by_what_it_waits_for() -> None:
    found = simulate("bsp-a2a", JOB, hosts(4), network=SLOW).prediction
    # One bucket of 4 MB, half of the step.
    assert found.because == (
        ("computes", pytest.approx(0.5)),
        ("waits for the all-reduce (network) of bucket 0, 3.8 MiB", pytest.approx(0.5)),
    )
    assert found.in_words() == "Of a step 50% computes, 50% waits for the all-reduce (network) of bucket 0, 3.8 MiB."


def test_latency_has_a_name_of_its_own_and_algorithms_have_theirs() -> None:
    late = simulate("bsp-a2a", JOB, hosts(4), network=Line(byte_s=0.0, latency_s=4.0)).prediction
    assert late.because[1] == (
        "waits for the latency of the all-reduce (network) of bucket 0, 3.8 MiB",
        pytest.approx(0.5),
    )
    ring = simulate("bsp / all_reduce(algorithm=ring) / none / sequential", JOB, hosts(4), network=SLOW).prediction
    assert "the ring all-reduce (network) of bucket 0" in ring.because[1][0]
    several = simulate("bsp / all_reduce / none / wfbp", JOB, hosts(4), network=SLOW).prediction
    assert several.because[0] == (
        "waits for the all-reduce (network) of 2 buckets (longest: bucket 0, 1.9 MiB)",
        pytest.approx(4 / 7),
    )


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("bsp / all_reduce / int8(route=scatter) / sequential", "the all-to-all (network)"),
        ("bsp / all_reduce / int8(route=gather) / sequential", "the all-gather (network)"),
        ("bsp / all_reduce / none / dear(bytes=1MiB)", "the reduce-scatter (network)"),
        ("bsp / gossip / none", "the exchange with neighbours (network)"),
        ("bsp / parameter_server / none / sequential", "the way to the server and back (network)"),
        ("bsp / all_reduce / gtopk / sequential", "the exchange with a partner (network)"),
    ],
)
def test_every_kind_of_move_has_words(strategy: str, words: str) -> None:
    found = simulate(strategy, JOB, hosts(4), network=Line(byte_s=1e-4)).prediction
    assert any(words in what for what, _ in found.because), found.because


def test_shares_add_up() -> None:
    for name in PRESETS:
        found = simulate(name, JOB, hosts(4), network=Line(byte_s=1e-7, startup_s=1e-3, latency_s=1e-2)).prediction
        assert sum(share for _, share in found.because) == pytest.approx(1)
        assert list(found.because) == sorted(found.because, key=lambda entry: -entry[1])


def test_json_has_everything_but_the_plans() -> None:
    found = simulate("ddp", JOB, hosts(4), network=SLOW).prediction
    document = json.loads(json.dumps(found.as_json()))
    assert document["step_s"] == found.step_s
    assert document["exposed_s"] == pytest.approx(found.step_s - found.compute_s)
    assert document["spread_s"] is None
    assert {"plans"} == {"plans", *vars(found)} - {
        *document,
        "because",  # critical_path
        "spread",  # spread_s
    }


def test_a_simulation_has_what_it_was_read_off_from() -> None:
    found = simulate("ddp", JOB, hosts(4), network=SLOW)
    assert found.graph.num_tasks == len(found.task_graph.labels) == len(found.outcome.end_s)
    ends = [float(found.outcome.end_s[step[0]]) for step in found.task_graph.step_ends]
    assert ends[-1] - ends[-2] == pytest.approx(found.prediction.step_s)


def test_shared_says_how_many_times_as_long() -> None:
    assert Shared(strategy="ddp", workload="x", alone_s=2.0, together_s=3.0).slowdown == 1.5
    assert Shared(strategy="ddp", workload="x", alone_s=0.0, together_s=0.0).slowdown == 1.0
