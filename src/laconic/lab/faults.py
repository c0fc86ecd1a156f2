"""The faults that a lab can inject, as typed: `--kill "rank=2 at=10s"`, `--cut-link 0-1`, `--slow rank=3,5x`.

A fault is a few words, separated by spaces or commas:

    rank=2      the process that has this rank at that moment       host=1      all processes of this host
    at=10s      once, so long after training has begun              every=30s   again and again
    for=2s      undone after so long                                5x          (slow) with a fifth of the time
    after=5s    (join) so long after a process has died             0-1, 2      (cut-link) two hosts; one host

Time zero is the moment at which the first ranks train together. A fault without a time comes then; one that names no
process strikes a process drawn at random.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from laconic.errors import InvalidSetting, UsageError, did_you_mean, one_line
from laconic.membership.limits import STOPPED_S
from laconic.units import format_time, parse_quantity

FaultKind = Literal["kill", "join", "freeze", "cut-link", "slow"]
FAULT_KINDS: tuple[FaultKind, ...] = ("kill", "join", "freeze", "cut-link", "slow")
"""Each is an option of `laconic lab`."""
_WORDS: Mapping[FaultKind, tuple[str, ...]] = {
    "kill": ("rank", "host", "at", "every"),
    "join": ("host", "at", "every", "after"),
    "freeze": ("rank", "host", "at", "every", "for"),
    "cut-link": ("at", "every", "for"),
    "slow": ("rank", "at", "every", "for"),
}
_EXAMPLES: Mapping[FaultKind, str] = {
    "kill": '"rank=2 at=10s", "host=1" or "every=30s"',
    "join": '"after=5s" or "at=20s host=1"',
    "freeze": '"rank=1 at=10s for=0.5s" or "host=1"',
    "cut-link": '"0-1 at=10s for=5s" or "2"',
    "slow": '"rank=3,5x" or "3x at=10s for=30s"',
}
_TIMES = {"at": "at_s", "every": "every_s", "for": "for_s", "after": "after_s"}
_FACTOR = re.compile(r"(\d+(?:\.\d+)?)x")
_PLACE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong, or a process that joins."""

    kind: FaultKind
    rank: int | None = None
    host: int | None = None
    peer: int | None = None
    """Of cut-link: the other host; None: `host` is cut off from all others."""
    factor: float | None = None
    """Of slow: how many times as long its work takes."""
    at_s: float | None = None
    every_s: float | None = None
    for_s: float | None = None
    after_s: float | None = None

    @property
    def first_s(self) -> float | None:
        """When it comes for the first time, from the beginning of training; None: after a death."""
        if self.after_s is not None:
            return None
        return self.every_s if self.every_s is not None else self.at_s or 0.0

    def __str__(self) -> str:
        """As an option that reads back to the same fault."""
        words: list[str] = []
        if self.kind == "cut-link":
            words.append(f"{self.host}" if self.peer is None else f"{self.host}-{self.peer}")
        else:
            words += [f"{name}={value}" for name in ("rank", "host") if (value := getattr(self, name)) is not None]
        if self.factor is not None:
            words.append(f"{self.factor:.12g}x")
        for word, field in _TIMES.items():
            if (seconds := getattr(self, field)) is not None:
                words.append(f"{word}={format_time(seconds)}")
        return f'--{self.kind} "{" ".join(words)}"'


def parse_fault(kind: FaultKind, text: str) -> Fault:
    """Read the words after an option; UsageError says what to write."""
    found: dict[str, float | int] = {}
    for word in re.split(r"[\s,]+", text.strip(" \t\n,")):
        _take(kind, text, word, found)
    fault = Fault(kind=kind, **found)  # pyrefly: ignore[bad-argument-type]
    _check(fault, text)
    return fault


def _problem(kind: FaultKind, text: str, what: str) -> UsageError:
    return UsageError(f'--{kind} "{one_line(text, 60)}": {what} Write for example {_EXAMPLES[kind]}.')


def _take(kind: FaultKind, text: str, word: str, found: dict[str, float | int]) -> None:
    """Add what one word says."""
    name, equals, value = word.partition("=")
    read: dict[str, float | int] = {}
    if not word:
        if kind not in ("kill", "freeze"):
            raise _problem(kind, text, "the option is empty.")
    elif not equals and kind == "slow" and (match := _FACTOR.fullmatch(word)) is not None:
        read = {"factor": float(match[1])}
    elif not equals and kind == "cut-link" and (match := _PLACE.fullmatch(word)) is not None:
        read = {"host": int(match[1])}
        if match[2] is not None:
            read["peer"] = int(match[2])
    elif not equals or name not in _WORDS[kind]:
        raise _problem(kind, text, f'there is no word "{one_line(name, 20)}". {did_you_mean(name, _WORDS[kind])}')
    elif name in _TIMES:
        try:
            read = {_TIMES[name]: parse_quantity(value, "time", name)}
        except InvalidSetting as exc:
            raise _problem(kind, text, str(exc)) from exc
    elif not value.isascii() or not value.isdigit() or len(value) > 6:
        raise _problem(kind, text, f'{name} must be a whole number, got "{one_line(value, 20)}".')
    else:
        read = {name: int(value)}
    twice = next((key for key in read if key in found), None)
    if twice is not None:
        raise _problem(kind, text, f"{twice.removesuffix('_s')} is given twice.")
    found |= read


def _check(fault: Fault, text: str) -> None:
    """Raise for words that exclude each other, or would have no effect."""
    kind = fault.kind

    def refuse(wrong: bool, what: str) -> None:
        if wrong:
            raise _problem(kind, text, what)

    refuse(kind != "cut-link" and fault.rank is not None and fault.host is not None, "give rank or host, not both.")
    times = [fault.at_s, fault.every_s, fault.after_s]
    refuse(sum(time is not None for time in times) > 1, "give one of at, every and after.")
    refuse(any(time is not None and not time >= 0 for time in times), "a time must be >= 0.")
    refuse(fault.every_s is not None and not fault.every_s > 0, "every must be longer than 0 s.")
    refuse(fault.for_s is not None and not fault.for_s > 0, "for must be longer than 0 s.")
    refuse(
        fault.every_s is not None and fault.for_s is not None and fault.for_s >= fault.every_s,
        "for must be shorter than every, or the fault would never end.",
    )
    refuse(kind == "join" and all(time is None for time in times), "say when: after, at or every.")
    refuse(
        kind == "join" and fault.after_s is not None and fault.host is not None,
        "after replaces dead processes where they ran. Leave host out.",
    )
    refuse(kind == "cut-link" and fault.host is None, "name two hosts, or one.")
    refuse(kind == "cut-link" and fault.host == fault.peer, "a host has no link to itself.")
    refuse(
        kind == "slow" and fault.factor is None, "say how many times as long the work of the process takes, e.g. 5x."
    )
    refuse(fault.factor is not None and not 1 < fault.factor <= 1000, "the factor must be over 1x and at most 1000x.")
    refuse(
        kind == "freeze" and fault.host is None and fault.for_s is not None and fault.for_s >= STOPPED_S,
        f"a process that stands still for {STOPPED_S:g} s is killed, so it cannot be woken later. Give a shorter "
        "time, or freeze a host.",
    )


def check_faults(faults: Sequence[Fault], *, num_hosts: int, num_ranks: int) -> None:
    """Raise for faults that name what a lab of this size does not have, or that say the same thing twice."""
    joins = any(fault.kind == "join" and fault.after_s is None for fault in faults)
    delays = [fault for fault in faults if fault.after_s is not None]
    if len(delays) > 1:
        raise UsageError(
            f"give {delays[0]} or {delays[1]}, not both: every dead process is replaced after the same time."
        )
    for fault in faults:
        for host in (fault.host, fault.peer):
            if host is not None and host >= num_hosts:
                raise UsageError(f"{fault}: there is no host {host}; hosts are numbered 0 to {num_hosts - 1}.")
        if fault.rank is not None and fault.rank >= num_ranks and not joins:
            raise UsageError(f"{fault}: there is no rank {fault.rank}; ranks are numbered 0 to {num_ranks - 1}.")


def replaced_after_s(faults: Sequence[Fault]) -> float:
    """How long after its death a process is replaced."""
    return next((fault.after_s for fault in faults if fault.after_s is not None), 0.0)


def next_s(fault: Fault, last_s: float) -> float:
    """When a fault that came at `last_s` comes again; infinity: never."""
    return math.inf if fault.every_s is None else last_s + fault.every_s
