"""Processes that end or stand still are noticed by the agent of their host."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch.distributed as dist

from laconic.membership.agent import spawn_command
from laconic.membership.decisions import Decisions
from laconic.membership.keeper import Keeper
from laconic.membership.launcher import Launch, Launcher
from laconic.membership.limits import BEAT_S, SILENT_S, STOPPED_S
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
