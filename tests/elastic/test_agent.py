"""Processes that end or stand still are noticed by the agent of their host."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from laconic.errors import LaconicError
from laconic.membership.agent import spawn_command
from laconic.membership.decisions import Decisions
from laconic.membership.keeper import Keeper
from laconic.membership.launcher import _GRACE_S, Launch, Launcher, run_workers
from laconic.membership.limits import BEAT_S, SILENT_S, STOPPED_S
from laconic.membership.member import WORKER_VARIABLE
from laconic.membership.view import KEEPER, Beat, Ready, to_text

pytestmark = pytest.mark.dist
_SLACK_S = 3.0
"""For a machine on which other tests run."""


def test_a_process_that_stands_still_is_killed() -> None:
    said: list[str] = []
    launch = Launch(spawn=spawn_command(["sleep", "60"]), num_workers=1, max_restarts=0)
    launcher = Launcher(launch, on_event=said.append)
    spawn = launcher.agent.spawn

    def stopped(environment):
        process = spawn(environment)
        os.kill(process.pid, signal.SIGSTOP)
        return process

    launcher.agent.spawn = stopped
    began_s = time.monotonic()
    launcher.run()
    assert time.monotonic() - began_s < 30
    assert said[0] == "worker 0.0 has been stopped for 1 s and is killed"
    assert said[1] == "worker 0.0 was ended by SIGKILL"


def test_processes_are_told_to_end_and_not_replaced() -> None:
    said: list[str] = []
    launch = Launch(spawn=spawn_command(["sleep", "60"]), num_workers=2)
    launcher = Launcher(launch, on_event=said.append)
    started = launcher.agent.start

    def start(slot: int):
        worker = started(slot)
        if slot == 1:
            launcher.leave()
        return worker

    launcher.agent.start = start  # pyrefly: ignore[bad-assignment]
    launcher.run()
    assert sorted(said) == ["worker 0.0 was ended by SIGTERM", "worker 0.1 was ended by SIGTERM"]


@pytest.mark.parametrize(("left", "waits"), [({"0.0"}, True), (set(), False)])
def test_the_end_of_training_ends_only_processes_that_have_not_trained_to_the_end(left: set[str], waits: bool) -> None:
    """The others may still evaluate or save the model."""
    job = SimpleNamespace(
        why_ended=lambda: None,
        is_ending=lambda: True,
        is_over=lambda: True,
        has_left=left.__contains__,
    )
    agent: Any = SimpleNamespace(workers={"0.0": None, "0.1": None}, ended=queue.Queue())
    done = threading.Thread(
        target=lambda: run_workers(agent, Launch(spawn=spawn_command([]), num_workers=2), cast(Any, job))
    )
    done.start()
    done.join(_GRACE_S + 1.5)
    assert done.is_alive() == waits
    agent.workers.clear()
    done.join(5)
    assert not done.is_alive()


_SHOW = (
    "import os, sys, time, torch.distributed as dist; dist.init_process_group('gloo');"
    "print(dist.get_rank(), dist.get_world_size(), os.environ['LOCAL_RANK'], os.environ['LACONIC_REPLICA'],"
    "os.environ['LACONIC_WORKER'], flush=True); dist.barrier(); {then}"
)


def _run_pairs(folder: Path, then: str, **settings: Any) -> tuple[list[str], list[str]]:
    """Two replicas of two processes that meet and do something; what the launcher says, and what they print."""
    said: list[str] = []

    def spawn(environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with (folder / f"{environment[WORKER_VARIABLE]}.printed").open("wb") as output:
            command = [sys.executable, "-c", _SHOW.format(then=then)]
            return subprocess.Popen(command, env=dict(environment), stdout=output, start_new_session=True)

    launch = Launch(spawn=spawn, num_workers=4, ranks_per_replica=2, **settings)
    launcher = Launcher(launch, on_event=said.append)
    launcher.run()
    assert not launcher.agent._stores, "the stores of replicas that have ended are closed"
    return said, sorted(line for path in folder.glob("*.printed") for line in path.read_text().splitlines())


@pytest.mark.slow
def test_the_ranks_of_a_replica_meet_in_a_store_of_their_own(tmp_path: Path) -> None:
    said, printed = _run_pairs(tmp_path, "pass")
    assert said == []
    assert printed == ["0 2 0 0.0 0.0", "0 2 2 0.2 0.2", "1 2 1 0.0 0.1", "1 2 3 0.2 0.3"]


@pytest.mark.slow
def test_a_replica_is_replaced_as_a_whole(tmp_path: Path) -> None:
    then = "os.environ['LACONIC_WORKER'] == '0.3' and os.kill(os.getpid(), 9); dist.get_rank() or time.sleep(3)"
    said, printed = _run_pairs(tmp_path, then)
    assert said == ["worker 0.3 was ended by SIGKILL", "replica 0.4 takes its place"]
    assert printed[-2:] == ["1 2 3 0.2 0.3", "1 2 3 0.4 0.5"]


@pytest.mark.slow
def test_an_error_that_comes_from_the_death_of_another_rank_does_not_count(tmp_path: Path) -> None:
    then = "os.environ['LACONIC_WORKER'] == '0.3' and os.kill(os.getpid(), 9); dist.barrier()"
    said, _ = _run_pairs(tmp_path, then, max_restarts=0)
    assert said == [
        "worker 0.3 was ended by SIGKILL",
        "replica 0.2 is not replaced: 0 have been (max restarts)",
    ]


@pytest.mark.slow
def test_the_script_of_one_rank_fails(tmp_path: Path) -> None:
    # The other rank loses its connections when the first one ends, and may have ended before it.
    then = "os.environ['LACONIC_WORKER'] == '0.3' and sys.exit(3); dist.barrier()"
    with pytest.raises(LaconicError, match=r"worker 0\.[23] ended with exit code [13]"):
        _run_pairs(tmp_path, then)
    (first, second), _ = _run_pairs(tmp_path, then, on_error="replace")
    assert re.fullmatch(r"worker 0\.[23] ended with exit code [13]", first)
    assert second == "replica 0.4 takes its place"


def test_workers_of_a_host_that_says_nothing_count_as_dead() -> None:
    ended: list[str] = []
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rules = Decisions(first=1, min_ranks=1, max_ranks=8)
    keeper = Keeper(("127.0.0.1", store.port), rules, silent_s=SILENT_S, on_end=ended.append)
    store.queue_push(KEEPER, to_text(Beat(agent="far", workers=("far.0",))))
    store.queue_push(KEEPER, to_text(Ready(worker="far.0", turn=0)))
    began_s = time.monotonic()
    until_s = began_s + 20
    while not ended and time.monotonic() < until_s:
        store.queue_push(KEEPER, to_text(Beat(agent="near", workers=("near.0",))))
        time.sleep(BEAT_S)
    noticed_s = time.monotonic() - began_s
    keeper.stop()
    assert rules.view is not None
    assert rules.view.members == ("far.0",)
    assert "worker far.0 is on a host that said nothing for 1.5 s" in ended[0]
    # The others are to have made their next step 2.5 s after a host has frozen; they need half a second for it.
    assert SILENT_S <= noticed_s <= 2.0 + _SLACK_S
    assert SILENT_S + BEAT_S <= 2.0
    assert BEAT_S + STOPPED_S + BEAT_S <= 2.0
