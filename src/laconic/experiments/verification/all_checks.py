"""All checks by name, and how they run on threads."""

from __future__ import annotations

import time
from collections.abc import Callable

from laconic.architecture.contract import NothingMeasured
from laconic.errors import AttachError, UsageError, one_line
from laconic.experiments.verification import learning, replicas, settings, staleness, state, traces, traffic
from laconic.experiments.verification.outcome import Findings, Outcome, failed
from laconic.experiments.verification.stage import Stage, on_threads, virtual_hosts
from laconic.experiments.verification.trainee import fitting_size
from laconic.strategy import Strategy

Check = Callable[[Stage, Strategy], Outcome]

CHECKS: dict[str, Check] = {
    "replicas": replicas.check,
    "staleness": staleness.check,
    "bytes": traffic.check,
    "state": state.check,
    "detach": traces.check,
    "settings": settings.check,
    "learns": learning.check,
}
"""name -> check, in the order in which they run."""

_LEAST_WORKERS, _MOST_WORKERS = 2, 16


def verify_on_threads(
    strategy: Strategy, workers: int, *, on_check: Callable[[str, Outcome], None] = lambda name, outcome: None
) -> Findings:
    """Run every check with that many threads as workers; raises UsageError if the strategy cannot be checked."""
    if strategy.architecture.holds_shards:
        raise UsageError(f'verify: "{strategy.architecture.name}" needs a process for each shard, not a thread.')
    check_possible(strategy, workers)
    began_s = time.monotonic()
    outcomes: dict[str, Outcome] = {}
    for name, check in CHECKS.items():
        outcomes[name] = _made(check, strategy, workers)
        on_check(name, outcomes[name])
    return Findings(
        strategy=str(strategy),
        workers=workers,
        where="threads",
        outcomes=outcomes,
        seconds=time.monotonic() - began_s,
    )


def _made(check: Check, strategy: Strategy, workers: int) -> Outcome:
    try:
        return on_threads(workers, lambda stage: check(stage, strategy))[0]
    except Exception as exc:  # noqa: BLE001 - a method may fail in any way; the failure is the result
        return failed(raised(exc))


def raised(exc: Exception) -> str:
    """An error as the result of a check."""
    return f"raised {type(exc).__name__}: {one_line(exc, 300)}"


def check_possible(strategy: Strategy, workers: int) -> None:
    """Raise UsageError or AttachError if checks of this strategy cannot be made here."""
    if not _LEAST_WORKERS <= workers <= _MOST_WORKERS:
        raise UsageError(
            f"verify: workers must be >= {_LEAST_WORKERS} and <= {_MOST_WORKERS}, got {workers}. One replica always "
            "agrees with itself, and many do not fit on one machine."
        )
    servers = strategy.architecture.servers
    if servers is not None and servers.hosts:
        raise UsageError(
            f'verify: {strategy.architecture.name}.hosts="{servers.hosts}" names servers that run already, and checks '
            "start and end servers of their own. Leave hosts out."
        )
    try:
        strategy.architecture.settled(lambda: virtual_hosts(workers), NothingMeasured())
    except AttachError as exc:
        raise UsageError(
            f"verify: with {workers} workers, two on each virtual host, nothing could be checked: {exc} Or give "
            "another number of --workers, e.g. 4."
        ) from exc
    fitting_size(strategy)
