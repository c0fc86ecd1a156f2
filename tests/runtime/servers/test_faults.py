"""What goes wrong around servers: nothing hangs, who and what is named, and parameters stay whole."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

import pytest

from tests.processes import RankResult, SignalAfterLine, run_processes
from tests.runtime.replicas import assert_equal

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(120)]


def stops(
    strategy: str, victim: int, how: str, *, kill: bool = False, world_size: int = 2, also: Sequence[int] = ()
) -> list[RankResult]:
    return run_processes(
        "tests.runtime.servers.ranks:stops",
        world_size=world_size,
        arguments={"strategy": strategy, "victim": victim, "how": how, "also": list(also)},
        send_signal=SignalAfterLine(rank=victim, line="ready") if kill else None,
        timeout_s=90,
    )


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def children_of(result: RankResult) -> list[int]:
    line = next(line for line in result.stdout.splitlines() if line.startswith("children"))
    return [int(pid) for pid in line.split()[1:]]


def test_outsiders_and_a_pause_do_no_harm() -> None:
    results = run_processes(
        "tests.runtime.servers.ranks:outsiders",
        world_size=2,
        arguments={"strategy": "bsp / parameter_server(shards=1)"},
        timeout_s=90,
    )
    plain = run_processes(
        "tests.runtime.servers.ranks:undisturbed", world_size=2, arguments={"strategy": "bsp / all_reduce"}
    )
    for result in results:
        assert_equal(result.value["model"], plain[0].value["model"])
    assert "this is not laconic" in results[0].stderr
    assert "another token than this job's" in results[0].stderr


def test_a_server_that_is_killed_is_named() -> None:
    for result in stops("bsp / parameter_server(shards=1)", 0, "kill server"):
        assert result.value["error"].startswith("PeerLost")
        assert "server 0 of rank 0 at 127.0.0.1:" in result.value["error"]
        assert "in step 5" in result.value["error"]
        assert result.value["seconds"] < 8
        assert result.value["unharmed"]
        assert result.value["children"] == 0


def test_a_worker_that_is_killed_takes_its_server_along_and_is_named() -> None:
    results = stops("ssp(staleness=1) / parameter_server(shards=1)", 0, "kill", kill=True, world_size=3)
    assert results[0].exit_code == -signal.SIGKILL
    for survivor in results[1:]:
        assert "rank 0" in survivor.value["error"], survivor.value
        assert survivor.value["seconds"] < 15
        assert survivor.value["unharmed"]
    (server,) = children_of(results[0])
    deadline_s = time.monotonic() + 15
    while not gone(server) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert gone(server)


def test_a_spare_worker_that_is_killed_is_named() -> None:
    """It is not waited for, but it is not forgotten: the job ends for all, as with every other rule."""
    results = stops("backup(spare=1)", 2, "kill", kill=True, world_size=3)
    assert results[2].exit_code == -signal.SIGKILL
    for survivor in results[:2]:
        assert survivor.value["error"].startswith("PeerLost")
        assert "rank 2" in survivor.value["error"], survivor.value
        assert survivor.value["seconds"] < 15


def test_more_stalled_workers_than_spare_ones_are_named_to_the_one_that_waits() -> None:
    results = stops("backup(spare=1)", 1, "stall", also=[2], world_size=3)
    assert "rank 1, 2 stalled at bucket 0" in results[0].value["error"]
    assert "the limit is 4 s" in results[0].value["error"]
    assert results[0].value["seconds"] < 8, "only when they continue"


def test_a_worker_that_stalls_is_named_to_those_who_wait() -> None:
    results = stops("bsp / parameter_server(shards=1)", 1, "stall", world_size=3)
    for waiting in (results[0], results[2]):
        assert "rank 1 stalled at bucket 0" in waiting.value["error"]
        assert "the limit is 4 s" in waiting.value["error"]
        assert waiting.value["error"].startswith("PeerLost")
        assert waiting.value["seconds"] < 6
        assert waiting.value["unharmed"]
    assert "rank 1" in results[1].value["error"] or "rank 0" in results[1].value["error"]


def test_a_worker_that_raises_is_named_with_its_error() -> None:
    results = stops("bsp / parameter_server(shards=1)", 0, "raise")
    assert results[0].value["error"] == "ValueError: the data loader broke"
    assert "rank 0 raised ValueError: the data loader broke" in results[1].value["error"]
    assert results[1].value["seconds"] < 8
    assert results[0].value["children"] == 0
