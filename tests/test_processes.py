"""The tool that starts ranks must itself be trusted: results, failures, signals, timeouts, no leftovers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.processes import Command, SignalAfterLine, is_running, run_processes, start_together

pytestmark = [pytest.mark.dist, pytest.mark.timeout(60)]


def test_failure_shows_every_ranks_output() -> None:
    script = "import os, sys\nprint('out of', os.environ['RANK'])\nsys.exit(int(os.environ['RANK']) * 7)\n"
    with pytest.raises(AssertionError) as caught:
        run_processes(script, world_size=2, timeout_s=40)
    message = str(caught.value)
    assert "ranks [1]" in message
    assert "out of 0" in message
    assert "out of 1" in message
    assert "exit code 7" in message
    assert [result.exit_code for result in run_processes(script, world_size=2, timeout_s=40, may_fail=True)] == [0, 7]


def test_script_gets_arguments_and_writes_json() -> None:
    script = "import json\nresult_file.write_text(json.dumps({'twice': 2 * arguments['number']}))\n"
    assert run_processes(script, world_size=1, arguments={"number": 21}, timeout_s=40)[0].value == {"twice": 42}


def test_signal_is_sent_after_the_line_and_only_to_that_rank() -> None:
    script = "import os, time\nprint('ready')\ntime.sleep(60 if os.environ['RANK'] == '1' else 0)\n"
    results = run_processes(script, world_size=2, timeout_s=40, send_signal=SignalAfterLine(1, "ready", signal.SIGKILL))
    assert [result.exit_code for result in results] == [0, -signal.SIGKILL]
    with pytest.raises(AssertionError, match="never printed 'something else'"):
        run_processes("pass\n", world_size=1, timeout_s=40, send_signal=SignalAfterLine(0, "something else"))


def test_timeout_fails_and_leaves_nothing_behind() -> None:
    script = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print('started', os.getpid(), child.pid)\n"
        "time.sleep(60)\n"
    )
    with pytest.raises(AssertionError, match=r"of a script still ran after 2 s") as caught:
        run_processes(script, world_size=1, timeout_s=2)
    line = next(line for line in str(caught.value).splitlines() if line.startswith("started"))
    deadline_s = time.monotonic() + 5  # a process that was killed is gone when the kernel has found the time
    for pid in map(int, line.split()[1:]):
        while is_running(pid) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert not is_running(pid), f"process {pid} is still there"


def test_own_process_is_untouched() -> None:
    # start_new_session: a kill of the group a rank leads must never reach the tests themselves.
    script = "import os\nresult_file.write_text(str(os.getpgid(0)))\n"
    assert run_processes(script, world_size=1, timeout_s=40)[0].value != os.getpgid(0)


def test_runs_at_the_same_time_are_told_apart() -> None:
    script = "import sys\nsys.exit(arguments['code'])\n"
    codes = range(8)
    begun = start_together(
        {
            str(code): {"target": script, "world_size": 2, "arguments": {"code": code}, "may_fail": True}
            for code in codes
        }
    )
    assert [[result.exit_code for result in begun[str(code)].result()] for code in codes] == [[n, n] for n in codes]


def test_a_command_is_laconic_with_words(tmp_path: Path) -> None:
    with Command(["explain", "bsp / all_redcue"], tmp_path) as command:
        assert command.wait(40) == 2
    assert 'Did you mean "all_reduce"?' in command.stderr
    with Command(["lab", "--links", "paced", "--hosts", "1", "--", "sleep", "60"], tmp_path) as command:
        assert is_running(command.pid)
    assert command.exit_code == -signal.SIGKILL
    assert not is_running(command.pid)
