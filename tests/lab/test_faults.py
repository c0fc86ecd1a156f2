"""Faults as typed, and when they strike whom: without processes, on a clock that is moved."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.errors import UsageError
from laconic.lab.fault_injection import FaultInjector, Strike
from laconic.lab.faults import FAULT_KINDS, Fault, FaultKind, check_faults, parse_fault, replaced_after_s

TIMES = st.floats(0.001, 1e5, allow_nan=False)
SMALL = st.integers(0, 999)


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    kind = draw(st.sampled_from(FAULT_KINDS))
    when = draw(st.sampled_from(["at_s", "every_s", "after_s"] if kind == "join" else ["at_s", "every_s", None]))
    said: dict[str, float | int] = {when: draw(TIMES)} if when else {}
    if kind == "cut-link":
        said["host"] = draw(SMALL)
        if draw(st.booleans()):
            said["peer"] = draw(SMALL.filter(lambda peer: peer != said["host"]))
    elif kind in ("kill", "freeze", "slow") and draw(st.booleans()):
        said["rank"] = draw(SMALL)
    elif kind != "slow" and when != "after_s" and draw(st.booleans()):
        said["host"] = draw(SMALL)
    if kind == "slow":
        said["factor"] = draw(st.integers(11, 10_000)) / 10
    if kind in ("freeze", "cut-link", "slow") and draw(st.booleans()):
        shortest = min(said.get("every_s", 1.0), 1.0)
        said["for_s"] = shortest / draw(st.integers(2, 50))
    return Fault(kind=kind, **said)  # pyrefly: ignore[bad-argument-type]


@given(faults(), st.sampled_from([" ", ",", ", ", "   "]), st.randoms(use_true_random=False))
def test_every_fault_reads_back_from_its_own_words(fault: Fault, between: str, order: random.Random) -> None:
    option, _, quoted = str(fault).partition(" ")
    words = quoted.strip('"').split()
    order.shuffle(words)
    assert option == f"--{fault.kind}"
    assert parse_fault(fault.kind, between.join(words)) == fault


@given(
    st.sampled_from(FAULT_KINDS), st.text(st.characters() | st.sampled_from(list("rankhosteveryfor=0123456789sx,- ")))
)
def test_any_text_is_a_fault_or_refused_with_an_example(kind: FaultKind, text: str) -> None:
    try:
        fault = parse_fault(kind, text)
    except UsageError:
        with pytest.raises(UsageError, match=f"^--{kind} .*Write for example"):
            parse_fault(kind, text)
    else:
        assert parse_fault(kind, str(fault).partition(" ")[2].strip('"')) == fault


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("kill", "rnk=2", 'Did you mean "rank"'),
        ("kill", "rank=2 host=1", "give rank or host, not both"),
        ("kill", "at=1s every=2s", "give one of at, every and after"),
        ("kill", "rank=two", "rank must be a whole number"),
        ("kill", "at=soon", "at must be a time such as 5ms"),
        ("kill", "rank=1 rank=2", "rank is given twice"),
        ("kill", "every=0s", "every must be longer than 0 s"),
        ("kill", "for=2s", "Known: rank, host, at, every"),
        ("join", "host=1", "say when"),
        ("freeze", "rank=1 for=3s", "stands still for 1 s is killed"),
        ("freeze", "host=1 every=2s for=2s", "for must be shorter than every"),
        ("slow", "rank=3", "e.g. 5x"),
        ("slow", "rank=3,0.5x", "over 1x"),
        ("cut-link", "1-1", "no link to itself"),
        ("cut-link", "at=3s", "name two hosts, or one"),
    ],
)
def test_what_is_wrong_is_said(kind: FaultKind, text: str, told: str) -> None:
    with pytest.raises(UsageError, match="Write for example") as caught:
        parse_fault(kind, text)
    assert told in str(caught.value)


def test_what_the_lab_does_not_have_is_refused() -> None:
    def check(*texts: tuple[FaultKind, str]) -> None:
        check_faults([parse_fault(*text) for text in texts], num_hosts=2, num_ranks=4)

    check(("kill", "rank=3"), ("cut-link", "0-1"), ("join", "after=5s"), ("join", "at=2s"))
    check(("kill", "rank=4"), ("join", "at=2s"))  # there may be five by then
    with pytest.raises(UsageError, match="no rank 4; ranks are numbered 0 to 3"):
        check(("kill", "rank=4"))
    with pytest.raises(UsageError, match="no host 2; hosts are numbered 0 to 1"):
        check(("cut-link", "0-2"))
    with pytest.raises(UsageError, match="replaced after the same time"):
        check(("join", "after=5s"), ("join", "after=6s"))
    assert replaced_after_s([parse_fault("join", "after=5s")]) == 5.0
    assert replaced_after_s([parse_fault("join", "at=5s")]) == 0.0


class Recorded:
    """Processes h0.0, h0.1, h1.0, h1.1 on two hosts; notes what is done to them."""

    num_hosts = 2

    def __init__(self) -> None:
        self.running = ["h0.0", "h0.1", "h1.0", "h1.1"]
        self.ranks = ["h1.1", "h1.0", "h0.1", "h0.0"]
        self.done: list[str] = []

    def members(self) -> Sequence[str]:
        return self.ranks

    def processes(self, host: int | None = None) -> Sequence[str]:
        return [name for name in self.running if host is None or name.startswith(f"h{host}.")]

    def kill(self, process: str) -> None:
        self.done.append(f"kill {process}")
        self.running.remove(process)

    def stop(self, process: str) -> None:
        self.done.append(f"stop {process}")

    def wake(self, process: str) -> None:
        self.done.append(f"wake {process}")

    def slow(self, process: str, factor: float) -> None:
        self.done.append(f"slow {process} {factor:g}")

    def freeze(self, host: int, *, frozen: bool) -> None:
        self.done.append(f"freeze {host} {frozen}")

    def cut(self, host: int, peer: int | None, *, cut: bool) -> None:
        self.done.append(f"cut {host} {peer} {cut}")

    def start(self, host: int) -> str:
        self.running.append(f"h{host}.9")
        self.done.append(f"start {host}")
        return f"h{host}.9"


def injected(*texts: tuple[FaultKind, str], seed: int = 0) -> tuple[FaultInjector, Recorded, list[Strike]]:
    job, told = Recorded(), list[Strike]()
    injector = FaultInjector([parse_fault(*text) for text in texts], job, seed=seed, tell=told.append)
    return injector, job, told


def test_faults_strike_at_their_times_and_are_undone() -> None:
    injector, job, told = injected(
        ("kill", "rank=2 at=10s"), ("freeze", "host=1 at=3s for=2s"), ("cut-link", "0-1"), ("slow", "rank=3,5x for=4s")
    )
    injector.look(0.0)
    assert job.done == ["cut 0 1 True", "slow h0.0 5"]
    injector.look(3.0)
    assert job.done[2:] == ["freeze 1 True", "stop h1.0", "stop h1.1"]
    injector.look(4.9)
    injector.look(5.0)
    assert job.done[5:] == ["slow h0.0 1", "freeze 1 False", "wake h1.0", "wake h1.1"]
    injector.look(10.5)
    assert job.done[9:] == ["kill h0.1"]
    assert [strike.over for strike in told] == [False, False, False, True, True, False]
    assert told[0].processes == ("h0.0", "h0.1", "h1.0", "h1.1"), "those at the ends of the link"
    injector.look(1000.0)
    assert len(job.done) == 10
    assert injector.without_effect(1000.0, num_replaced=0) == []


def test_a_repeated_fault_strikes_drawn_members_once_for_each_period() -> None:
    injector, job, _ = injected(("kill", "every=2s"))
    for tenth in range(70):
        injector.look(tenth / 10)
    assert len(job.done) == 3
    assert len(job.running) == 1
    # After a pause of many periods it strikes once.
    injector.look(100.0)
    injector.look(100.1)
    assert len(job.done) == 4
    again = injected(("kill", "every=2s"))
    for tenth in range(70):
        again[0].look(tenth / 10)
    assert again[1].done == job.done[:3]  # the same seed draws the same


def test_a_process_joins_where_there_are_fewest() -> None:
    injector, job, told = injected(("kill", "rank=0"), ("join", "at=1s"))
    injector.look(0.0)
    injector.look(1.0)
    assert job.done == ["kill h1.1", "start 1"]
    assert told[1].processes == ("h1.9",)
    assert injector.num_joined == 1


def test_faults_without_effect_are_named() -> None:
    injector, job, _ = injected(("kill", "rank=7"), ("kill", "at=1h"), ("join", "after=5s"), ("freeze", "rank=0"))
    injector.look(0.0)
    told = injector.without_effect(12.34, num_replaced=0)
    assert told == [
        '--kill "rank=7" had no effect: there was no rank 7 at that moment.',
        '--kill "at=3600s" had no effect: training was over after 12.3 s.',
        '--join "after=5s" had no effect: no process died.',
    ]
    assert job.done == ["stop h1.1"]
    (told,) = injector.without_effect(None, num_replaced=0)
    assert "no process became a rank of elastic training" in told
