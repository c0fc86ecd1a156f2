"""Inference services that share the cluster: how many replicas meet a latency target.

A replica answers one request after the other, each in `request_s` on average. Requests come at random (Poisson) and
wait for the first free replica. With c replicas and a = requests_per_s x request_s of them busy on average

    P(a request waits) = C(c, a)                                      Erlang's formula
    P(it waits longer than t) = C(c, a) exp(-(c - a) t / request_s)

A request is late if its waiting time and `request_s` together exceed `latency_s`. A service wants the fewest replicas
with which at most 1% of its requests are late, at the highest load of the round to come.

Reference: Erlang 1917, "Solution of some problems in the theory of probabilities of significance in automatic telephone
exchanges"; Kleinrock 1975, Queueing Systems, volume 1 (M/M/c).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from laconic.errors import UsageError, one_line
from laconic.jobs.csv_rows import Line, read_lines
from laconic.jobs.job import MOST_GPUS

LATE = 0.01
"""Share of the requests that may be late."""
_COLUMNS = ("service", "arrival_s", "duration_s", "requests_per_s", "request_s", "latency_s")


@dataclass(frozen=True, kw_only=True)
class Service:
    """One line of a file of services."""

    name: str
    arrival_s: float
    duration_s: float
    """How long the service is present."""
    requests_per_s: tuple[float, ...]
    """Requests per second in equal parts of that time."""
    request_s: float
    """The time that one replica takes for one request, on average."""
    latency_s: float
    """The latency target."""
    gpus: int = 1
    """GPUs of one replica."""

    def __post_init__(self) -> None:
        where = f'service "{one_line(self.name, 60)}"'
        for key in ("duration_s", "request_s", "latency_s"):
            if not 0 < getattr(self, key) < 1e9:
                raise UsageError(f"{where}: {key} must be above 0 and below 1e9, got {getattr(self, key):g}.")
        if not 0 <= self.arrival_s < 1e9:
            raise UsageError(f"{where}: arrival_s must be at least 0 and below 1e9, got {self.arrival_s:g}.")
        if not self.requests_per_s or not all(0 <= rate < 1e9 for rate in self.requests_per_s):
            raise UsageError(f"{where}: requests_per_s must be one number or several, each at least 0 and below 1e9.")
        if not 1 <= self.gpus <= MOST_GPUS:
            raise UsageError(f"{where}: gpus must be between 1 and {MOST_GPUS}, got {self.gpus}.")
        if self.latency_s <= self.request_s:
            raise UsageError(
                f"{where}: a request takes {self.request_s:g} s, so a latency of {self.latency_s:g} s cannot be kept. "
                "Give a longer latency_s."
            )

    @property
    def end_s(self) -> float:
        """When it leaves."""
        return self.arrival_s + self.duration_s

    def load(self, begin_s: float, end_s: float) -> float:
        """The most requests per second between two times; 0 while the service is not present."""
        if end_s <= self.arrival_s or begin_s >= self.end_s:
            return 0.0
        part_s = self.duration_s / len(self.requests_per_s)
        first = int(max(0.0, begin_s - self.arrival_s) / part_s)
        last = math.ceil((min(end_s, self.end_s) - self.arrival_s) / part_s)
        return max(self.requests_per_s[first : max(last, first + 1)])

    def late_share(self, replicas: int, requests_per_s: float) -> float:
        """Share of the requests that are late; all of them if more come than the replicas can answer."""
        busy = requests_per_s * self.request_s
        if busy >= replicas:
            return 1.0 if busy else 0.0
        slack_s = self.latency_s - self.request_s
        return _waiting(replicas, busy) * math.exp(-(replicas - busy) * slack_s / self.request_s)

    def replicas(self, requests_per_s: float) -> int:
        """The fewest replicas with which at most 1% of the requests are late; at least one while it is present."""
        found = max(1, math.floor(requests_per_s * self.request_s))
        while self.late_share(found, requests_per_s) > LATE:
            found += 1
        return found


def _waiting(replicas: int, busy: float) -> float:
    """Erlang's C: the probability that all replicas are busy."""
    # Erlang's B by its recursion, which neither overflows nor cancels.
    blocked = 1.0
    for count in range(1, replicas + 1):
        blocked = busy * blocked / (count + busy * blocked)
    return blocked / (1 - busy / replicas * (1 - blocked))


def read_services(path: str | Path) -> list[Service]:
    """The services of a CSV file, one line each; requests_per_s may hold several numbers with ; between them."""
    lines = read_lines(path, _COLUMNS, ("gpus",))
    found = [_service(line) for line in lines]
    names = [service.name for service in found]
    for line, name in zip(lines, names, strict=True):
        if not name or names.count(name) > 1:
            raise line.wrong("service", "a name, each once")
    return found


def _service(line: Line) -> Service:
    try:
        rates = tuple(float(text) for text in line.text("requests_per_s").split(";"))
    except ValueError as exc:
        raise line.wrong("requests_per_s", "a number, or several with ; between them") from exc
    try:
        return Service(
            name=line.text("service"),
            requests_per_s=rates,
            gpus=line.whole("gpus") if line.text("gpus") else 1,
            **{key: line.number(key) for key in ("arrival_s", "duration_s", "request_s", "latency_s")},
        )
    except UsageError as exc:
        if str(exc).startswith(line.where):
            raise
        raise UsageError(f"{line.where}: {exc}") from exc
