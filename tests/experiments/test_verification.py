"""Each check passes on a strategy that keeps its promises and fails on one that breaks the promise it looks at."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from laconic.architecture import AllReduce, Gossip, ParameterServer
from laconic.compression import NoCompression
from laconic.core.exchange import Exchange, Round, Wire
from laconic.core.moment import Moment
from laconic.core.payload import Payload
from laconic.core.plan import Bucket, Plan
from laconic.core.stateful import BucketState
from laconic.core.tensor import TensorSpec
from laconic.errors import UsageError
from laconic.experiments.verification import CHECKS, Outcome, processes, staleness, traces, verify_on_threads
from laconic.experiments.verification.observation import most_in_flight
from laconic.experiments.verification.stage import on_threads, virtual_hosts
from laconic.lab.launch import RankFailed
from laconic.runtime import Session
from laconic.runtime.engine import Engine
from laconic.runtime.hooks.async_outer import AsyncOuterHooks
from laconic.runtime.hooks.async_server import AsyncServerHooks
from laconic.runtime.hooks.optimizer_steps import OptimizerSteps
from laconic.settings import count
from laconic.strategy import Strategy
from laconic.synchronization import Asp, LocalSgd, Ssp


def made(check: str, strategy: Strategy | str, workers: int = 2) -> Outcome:
    """The outcome of one check; every rank comes to the same."""
    chosen = Strategy.parse(strategy) if isinstance(strategy, str) else strategy
    outcomes = on_threads(workers, lambda stage: CHECKS[check](stage, chosen))
    assert all(outcome == outcomes[0] for outcome in outcomes)
    return outcomes[0]


def assert_failed(outcome: Outcome, *words: str) -> None:
    assert outcome.verdict == "failed", outcome
    for word in words:
        assert word in outcome.words


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        "bsp / all_reduce / int8(block=64)",
        "ssp(staleness=2) / parameter_server",
        "async_diloco(period=3, lr=0.5, momentum=0.6, buffer=3, spread=0.5) / parameter_server",
        "streaming_diloco(period=4, fragments=2)",
        "asp / gossip",
    ],
)
def test_a_strategy_that_keeps_its_promises_passes(strategy: str) -> None:
    findings = verify_on_threads(Strategy.parse(strategy), 2)
    assert not findings.failures
    assert list(findings.outcomes) == list(CHECKS)
    assert {"replicas", "bytes", "state", "detach", "learns"} <= {
        name for name, outcome in findings.outcomes.items() if outcome.verdict == "passed"
    }
    assert all(outcome.words for outcome in findings.outcomes.values())


# -- replicas --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Drifting(NoCompression):
    """Every rank reads something else."""

    name: ClassVar[str] = "drifting"

    def decode(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        super().decode(payload, out, state)
        out.mul_(1 + 1e-6 * state.moment.rank)


@dataclass(frozen=True, kw_only=True)
class Uneven(LocalSgd):
    """One rank goes further than agreed."""

    name: ClassVar[str] = "uneven"

    def outer(self, anchor: torch.Tensor, change: torch.Tensor, memory: dict[str, torch.Tensor], rate: float) -> None:
        anchor.sub_(change, alpha=1.001 if threading.current_thread().name == "rank-1" else 1.0)


@dataclass(frozen=True, kw_only=True)
class Aloof(Gossip):
    """Sends, and ignores what comes."""

    name: ClassVar[str] = "aloof"

    def exchange(
        self, flat: torch.Tensor, state: BucketState, compression: object, wire: Wire, own: torch.Tensor | None = None
    ) -> Exchange:
        kept = flat.clone()
        yield from super().exchange(flat, state, compression, wire, own)  # type: ignore[arg-type]
        flat.copy_(kept)


@dataclass(frozen=True, kw_only=True)
class Growing(Gossip):
    """Mixes with weights that add up to more than one."""

    name: ClassVar[str] = "growing"

    def exchange(
        self, flat: torch.Tensor, state: BucketState, compression: object, wire: Wire, own: torch.Tensor | None = None
    ) -> Exchange:
        yield from super().exchange(flat, state, compression, wire, own)  # type: ignore[arg-type]
        flat.mul_(1.0001)


def test_replicas_that_differ_after_a_step_are_found() -> None:
    assert_failed(made("replicas", Strategy(compression=Drifting())), "differ after step")


def test_replicas_that_differ_after_a_round_are_found() -> None:
    assert_failed(made("replicas", Strategy(synchronization=Uneven(period=2))), "differ")


def test_replicas_that_do_not_come_closer_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laconic.experiments.verification.replicas._MOST_ROUNDS", 20)
    assert_failed(made("replicas", Strategy(architecture=Aloof())), "do not come closer")


def test_a_mean_that_moves_is_found() -> None:
    assert_failed(made("replicas", Strategy(architecture=Growing()), workers=3), "their mean moved")


def test_an_average_that_is_not_what_servers_hold_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncServerHooks, "settle", lambda hooks: None)
    assert_failed(made("replicas", "asp / parameter_server"), "something else than the servers")
    monkeypatch.setattr(AsyncOuterHooks, "settle", lambda hooks: None)
    assert_failed(made("replicas", "async_diloco(period=2)"), "something else than the servers")


# -- staleness -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Stricter(Ssp):
    """Promises a tighter bound than the one servers read in its text and keep."""

    @property
    def lead(self) -> int:
        return self.staleness - 2


@dataclass(frozen=True, kw_only=True)
class Bounded(Asp):
    """Promises that nobody waits; servers read a rule with a bound in its text."""

    name: ClassVar[str] = "ssp"


def test_a_bound_that_does_not_hold_is_found() -> None:
    strategy = Strategy(synchronization=Stricter(staleness=4), architecture=ParameterServer())
    assert_failed(made("staleness", strategy), "the bound is 2")


def test_a_worker_that_waits_where_nobody_should_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staleness, "_PAUSES_S", (0.2, 0.6))
    strategy = Strategy(synchronization=Bounded(), architecture=ParameterServer())
    assert_failed(made("staleness", strategy), "came 3 steps ahead", "could not continue")


# -- bytes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Understated(NoCompression):
    """Says that it sends half of what it sends."""

    name: ClassVar[str] = "understated"

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        return (Round("sum", (bucket.nbytes // 2,)),)


@pytest.mark.parametrize("rule", ["bsp", "local_sgd(period=2)"])
def test_bytes_nobody_has_predicted_are_found(rule: str) -> None:
    strategy = Strategy(synchronization=Strategy.parse(rule).synchronization, compression=Understated())
    assert_failed(made("bytes", strategy), "payload bytes", "predicted are")


# -- state -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Forgetful(NoCompression):
    """Counts its exchanges where nothing is saved, and lets the count show."""

    name: ClassVar[str] = "forgetful"

    def decode(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        super().decode(payload, out, state)
        state.tables["count"] = state.tables.get("count", 0) + 1
        out.mul_(1 + 1e-3 * state.tables["count"])


@pytest.mark.parametrize("rule", ["bsp", "local_sgd(period=2)"])
def test_state_that_is_not_saved_is_found(rule: str) -> None:
    strategy = Strategy(synchronization=Strategy.parse(rule).synchronization, compression=Forgetful())
    assert_failed(made("state", strategy), "gives other parameters")


def test_state_that_is_not_loaded_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "load_state_dict", lambda session, state: None)
    assert_failed(made("state", "asp / gossip"), "is not what it was")


# -- detach ----------------------------------------------------------------------------------------------------


def test_hooks_left_behind_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OptimizerSteps, "detach", lambda steps: None)
    assert_failed(made("detach", "bsp"), "the optimizer has 2 hooks, 0 before")


def test_threads_left_behind_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[Engine] = []
    stop = Engine.stop
    monkeypatch.setattr(Engine, "stop", lambda engine: left.append(engine))  # noqa: PLW0108 - a method must bind
    monkeypatch.setattr(traces, "_SETTLE_S", 0.1)
    try:
        assert_failed(made("detach", "bsp"), "2 threads are left", "laconic-communication")
    finally:
        for engine in left:
            stop(engine)


def test_files_left_open_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []

    @dataclass(frozen=True, kw_only=True)
    class Hoarding(NoCompression):
        """Opens a file for every bucket."""

        name: ClassVar[str] = "hoarding"

        def init(self, bucket: Bucket) -> BucketState:
            left.append(os.open(os.devnull, os.O_RDONLY))
            return super().init(bucket)

    monkeypatch.setattr(traces, "_SETTLE_S", 0.1)
    try:
        assert_failed(made("detach", Strategy(compression=Hoarding())), "more files are open than before")
    finally:
        for descriptor in left:
            os.close(descriptor)


# -- settings --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Mute(NoCompression):
    """Has a setting nobody reads."""

    name: ClassVar[str] = "mute"
    volume: int = count(1)
    """How loud."""


@pytest.mark.parametrize("rule", ["bsp", "asp"])
def test_a_setting_without_effect_is_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laconic.experiments.verification.settings._WIDER", (4,))
    architecture = Gossip() if rule == "asp" else Strategy().architecture
    synchronization = Strategy.parse(f"{rule} / {architecture}").synchronization
    assert_failed(made("settings", Strategy(synchronization, architecture, Mute(volume=3))), "mute.volume=3:")


# -- learns ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Deaf(NoCompression):
    """Nothing arrives."""

    name: ClassVar[str] = "deaf"
    factor: ClassVar[float] = 0.0

    def decode(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        super().decode(payload, out, state)
        out.mul_(self.factor)


@dataclass(frozen=True, kw_only=True)
class Exploding(Deaf):
    """Gradients are beyond all bounds."""

    name: ClassVar[str] = "exploding"
    factor: ClassVar[float] = float("inf")


def test_a_loss_that_does_not_fall_is_found() -> None:
    assert_failed(made("learns", Strategy(compression=Deaf())), "does not fall")
    assert_failed(made("learns", Strategy(compression=Exploding())), "not finite")


# -- what else can happen --------------------------------------------------------------------------------------


def test_a_method_that_raises_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Broken(NoCompression):
        """Does not work at all."""

        name: ClassVar[str] = "broken"

        def encode(self, flat: torch.Tensor, state: BucketState) -> Payload:
            raise ZeroDivisionError("no such luck")

    for name in set(CHECKS) - {"learns"}:
        monkeypatch.delitem(CHECKS, name)
    findings = verify_on_threads(Strategy(compression=Broken()), 2)
    assert findings.failures == {"learns": findings.outcomes["learns"].words}
    assert "ZeroDivisionError: no such luck" in findings.failures["learns"]


def test_checks_that_processes_did_not_come_to_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_ranks(*_: object, on_line: Callable[[int, str], None], **__: object) -> None:
        on_line(0, '{"strategy": 0, "check": "replicas", "outcome": {"verdict": "passed", "words": "equal"}}')
        on_line(1, '{"strategy": 0, "check": "bytes", "outcome": {"verdict": "passed", "words": "only rank 0 tells"}}')
        raise RankFailed("rank 1 of 2 ended with signal SIGKILL", exit_code=137)

    monkeypatch.setattr(processes, "run_ranks", run_ranks)
    (findings,) = processes.verify_on_processes([Strategy()], 2)
    assert findings.outcomes["replicas"] == Outcome("passed", "equal")
    assert list(findings.failures) == [name for name in CHECKS if name != "replicas"]
    assert "rank 1 of 2 ended with signal SIGKILL" in findings.failures["bytes"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "seen"),
    [
        ("bsp / parameter_server / none / priority(credit_bytes=4KiB)", "1 exchange(s) of a large model in flight"),
        ("bsp / all_reduce(algorithm=hierarchical)", "other parameters"),
        ("bsp / all_reduce(algorithm=hierarchical, compress=between_hosts) / int8", "payload bytes instead of"),
    ],
)
def test_a_setting_with_an_effect_is_no_false_alarm(strategy: str, seen: str) -> None:
    findings = verify_on_threads(Strategy.parse(strategy), 4)
    assert findings.failures == {}
    assert seen in findings.outcomes["settings"].words


def test_bytes_in_flight_are_counted_as_the_plan_allows() -> None:
    buckets = tuple(Bucket((TensorSpec(f"t{number}", (256,)),)) for number in range(8))
    for credit_bytes, most in ((0, 0), (1, 1), (1024, 1), (1025, 2), (4096, 4), (1 << 20, 8)):
        assert most_in_flight(Plan(buckets, credit_bytes=credit_bytes)) == most


def test_virtual_hosts_hold_two_ranks() -> None:
    assert virtual_hosts(2) == ((0, 1),)
    assert virtual_hosts(5) == ((0, 1), (2, 3), (4,))


@pytest.mark.parametrize(("algorithm", "workers"), [("hierarchical", 2), ("torus2d", 3)])
def test_an_algorithm_that_is_another_one_here_is_refused_before_any_check(algorithm: str, workers: int) -> None:
    with pytest.raises(UsageError, match=r"another number of --workers, e\.g\. 4"):
        verify_on_threads(Strategy(architecture=AllReduce(algorithm=algorithm)), workers)


def test_what_cannot_be_checked_is_refused() -> None:
    with pytest.raises(UsageError, match="workers must be >= 2 and <= 16, got 1"):
        verify_on_threads(Strategy(), 1)
    with pytest.raises(UsageError, match="Leave hosts out"):
        verify_on_threads(Strategy(architecture=ParameterServer(hosts="there:1")), 2)
