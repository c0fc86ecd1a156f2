"""What cannot be simulated is refused with a sentence that says what was found, what is allowed and what to do."""

from __future__ import annotations

import pytest

from laconic.cluster import Cluster, Link
from laconic.errors import AttachError, LaconicError, StrategyError, UsageError
from laconic.simulator import Conditions, simulate
from laconic.workload import Layer, TensorShape, Workload
from tests.simulator.jobs import hosts, job

JOB = job((0.01, 0.02, 4_000_000))


@pytest.mark.parametrize("bandwidth_bps", [0, -1e9, float("nan"), float("inf"), 1e30])
def test_links_need_a_bandwidth(bandwidth_bps: float) -> None:
    with pytest.raises(UsageError, match="bandwidth must be between 1kbit and 10tbit"):
        Cluster.uniform(4, Link(bandwidth_bps=bandwidth_bps))


@pytest.mark.parametrize("workers", [0, -1, 5, 10**9])
def test_workers_need_devices(workers: int) -> None:
    with pytest.raises(UsageError, match=f"workers must be between 1 and 4, the devices of the cluster, got {workers}"):
        simulate("ddp", JOB, hosts(4), workers=workers)


@pytest.mark.parametrize("rank", [4, -1, 99])
def test_a_slow_rank_must_be_there(rank: int) -> None:
    with pytest.raises(UsageError, match=f"there is no rank {rank}; ranks are numbered 0 to 3"):
        simulate("ddp", JOB, hosts(4), conditions=Conditions(slow={rank: 2.0}))


@pytest.mark.parametrize(
    ("conditions", "words"),
    [
        ({"slow": {0: 0.0}}, "rank 0 must take between 0 and 1e6 times as long, got 0"),
        ({"slow": {1: -2.0}}, "rank 1 must take"),
        ({"slow": {1: float("nan")}}, "rank 1 must take"),
        ({"noise_ratio": -0.1}, "noise_ratio must be at least 0 and below 1, got -0.1"),
        ({"noise_ratio": 1.0}, "noise_ratio"),
        ({"interference_ratio": 1.0}, "interference_ratio"),
        ({"interference_ratio": float("nan")}, "interference_ratio"),
        ({"optimizer_s": -1.0}, "optimizer_s must be at least 0"),
        ({"optimizer_s": float("inf")}, "optimizer_s"),
    ],
)
def test_conditions_are_checked(conditions: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Conditions(**conditions)  # type: ignore[arg-type]


def test_conditions_that_do_not_exist_are_no_conditions() -> None:
    with pytest.raises(TypeError, match="jitter"):
        Conditions(jitter=0.1)  # type: ignore[call-arg]


def test_tensors_must_add_up_to_what_a_workload_says() -> None:
    text = JOB.to_json().replace('"num_parameters": 1000000', '"num_parameters": 999')
    with pytest.raises(UsageError, match="num_parameters says 999, but the shapes add up to 1000000"):
        Workload.from_json(text)


def test_keys_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UsageError, match="bandwith"):
        Cluster.from_toml('hosts = 4\nbandwidth = "1gbit"\nbandwith = "1gbit"\n')
    with pytest.raises(UsageError, match="forwards_s"):
        Workload.from_json(JOB.to_json().replace('"forward_s"', '"forwards_s"', 1))


@pytest.mark.parametrize(
    "strategy", ["ddpp", "bsp / all_reduce(algo=ring)", "bsp / all_reduce / none / fusion / x", ""]
)
def test_strategies_are_checked_as_everywhere(strategy: str) -> None:
    with pytest.raises(StrategyError):
        simulate(strategy, JOB, hosts(4))


def test_an_algorithm_without_effect_is_refused_as_when_attaching() -> None:
    with pytest.raises(AttachError, match="5 is a prime"):
        simulate("bsp / all_reduce(algorithm=torus2d)", JOB, hosts(5))


def test_periods_that_would_never_end_are_refused() -> None:
    with pytest.raises(UsageError, match=r"periods of up to 10000 steps are simulated, got 10001"):
        simulate("local_sgd(period=10001)", JOB, hosts(4))
    assert simulate("diloco(period=500)", JOB, hosts(4)).prediction.step_s < 1.01 * JOB.compute_s


def test_a_job_that_takes_no_time_has_no_speed() -> None:
    nothing = Workload(
        name="nothing",
        batch=1,
        source="Made up.",
        layers=(Layer(name="l", forward_s=0.0, backward_s=0.0, tensors=(TensorShape(name="w", shape=(4,)),)),),
    )
    found = simulate("ddp", nothing, hosts(4), workers=1).prediction
    assert (found.step_s, found.samples_per_s, found.efficiency) == (0.0, 0.0, 1.0)
    assert found.in_words() == "A step takes no time."
    assert simulate("ddp", nothing, hosts(4)).prediction.step_s > 0


def test_every_error_is_one_of_ours() -> None:
    """A person sees a sentence, not a traceback."""
    for strategy, workers in (("ddp", 9), ("hierarchical", 4), ("bsp / all_reduce(algorithm=hierarchical)", 4)):
        with pytest.raises(LaconicError):
            simulate(strategy, JOB, hosts(4), workers=workers)
