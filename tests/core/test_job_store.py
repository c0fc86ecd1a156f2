"""Connections to a store whose host freezes or ends: no rank waits for ever, and nothing is left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from laconic.core import job_store
from laconic.core.job_store import JobStore, in_time
from tests.processes import eventually

HOST = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(100)
"""


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A process that hosts the job's store."""
    with subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=timedelta(seconds=60))
        monkeypatch.setattr(job_store, "_default_store", lambda: dist.PrefixStore("job", store))
        yield process
        process.kill()


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("laconic")]


def _freeze(process: subprocess.Popen[str]) -> None:
    """Return once all of its threads stand still; until then one of them may still answer."""
    process.send_signal(signal.SIGSTOP)
    states = Path(f"/proc/{process.pid}/task").glob
    assert eventually(lambda: all((task / "stat").read_text().rpartition(")")[2][1] == "T" for task in states("*")), 5)


def _num_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_one_connection_writes_another_reads(host: subprocess.Popen[str]) -> None:
    one, other = JobStore(timeout_s=5.0), JobStore(timeout_s=5.0)
    one.under("a").set("key", "value")
    assert other.under("a").get("key") == b"value"
    assert not other.under("b").check(["key"])


def test_a_connection_made_while_an_error_is_handled_stays_open(host: subprocess.Popen[str]) -> None:
    try:
        raise KeyError("the error of the script")
    except KeyError:
        connection = JobStore(timeout_s=5.0)
        assert connection.store.add("words", 1) == 1
        connection.cut()


@pytest.mark.slow
def test_a_call_on_a_frozen_host_ends_when_the_connection_is_cut(host: subprocess.Popen[str]) -> None:
    before = _num_files()
    connection = JobStore(timeout_s=5.0)
    add = partial(connection.under("a").add, "key", 1)
    _freeze(host)
    with pytest.raises(TimeoutError, match=r"no answer in 0\.5 s"):
        in_time(add, timeout_s=0.5, thread_name="laconic-test")
    assert _threads() == ["laconic-test"]
    connection.cut()
    assert eventually(lambda: not _threads(), 5)
    del connection, add
    assert eventually(lambda: _num_files() <= before, 5)


def test_connecting_to_a_frozen_host_is_given_up_in_time(host: subprocess.Popen[str]) -> None:
    _freeze(host)
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        JobStore(timeout_s=1.0)
    assert time.monotonic() - began_s < 4
    assert eventually(lambda: not _threads(), 15)


def test_a_host_that_has_ended_is_noticed_at_once(host: subprocess.Popen[str]) -> None:
    host.kill()
    host.wait()
    began_s = time.monotonic()
    with pytest.raises(RuntimeError, match="refuses connections"):
        JobStore(timeout_s=30.0)
    assert time.monotonic() - began_s < 5


@pytest.mark.slow
def test_a_host_that_ends_just_before_the_connection_leaves_no_thread(
    host: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = job_store._raise_if_refused
    looks: list[int] = []

    def end_after_the_first_look(address: str | None, port: int | None) -> None:
        if not looks:
            host.kill()
            host.wait()
        else:
            refused(address, port)
        looks.append(len(looks))

    monkeypatch.setattr(job_store, "_raise_if_refused", end_after_the_first_look)
    with pytest.raises(RuntimeError, match="refuses connections"):
        JobStore(timeout_s=60.0)
    assert eventually(lambda: not _threads(), 10)


def test_what_a_call_raises_is_raised_and_what_a_look_finds_ends_it() -> None:
    def wrong() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        in_time(wrong, timeout_s=5.0, thread_name="laconic-test")
    asked = threading.Event()
    with pytest.raises(ValueError, match="wrong"):
        in_time(lambda: asked.wait(20), timeout_s=20.0, thread_name="laconic-test", look=wrong)
    asked.set()
    assert in_time(lambda: 3, timeout_s=5.0, thread_name="laconic-test") == 3
