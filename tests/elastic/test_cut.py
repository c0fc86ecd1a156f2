"""A group that is cut ends every wait in it, also one that Gloo itself would not end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from laconic.core.transport import Traffic
from laconic.membership.member import Member
from laconic.membership.transport import ViewTransport
from laconic.membership.view import View, ViewBroken
from tests.processes import SignalAfterLine, run_processes

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


class _Alone(Member):
    """A member of one view that nobody keeps."""

    def __init__(self, rank: int) -> None:
        self.name, self.timeout_s, self.lost = f"0.{rank}", 40.0, None
        self.address = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
        self._over: dict[int, str] = {}
        self._cuts: dict[int, list[Callable[[], None]]] = {}
        self._lock = threading.Lock()


def _broadcast(tensor: torch.Tensor) -> dict[str, object]:
    rank = int(os.environ["RANK"])
    member = _Alone(rank)
    store = dist.TCPStore(*member.address, is_master=rank == 0, wait_for_workers=False)
    view = View(number=0, members=("0.0", "0.1"), fresh=(), units=0, boundary=True)
    transport = ViewTransport(member, view, Traffic(), cuda=False)
    if rank == 1:
        work = transport.broadcast(tensor, what="a large tensor")
        store.set("posted", "")
        print("posted", flush=True)
        work.wait()
    store.wait(["posted"])
    time.sleep(1.0)  # the other one stands still by now
    work = transport.broadcast(tensor, what="a large tensor")
    threading.Timer(0.5, member.give_up, (0, "the other one stands still")).start()
    began_s = time.monotonic()
    with pytest.raises(ViewBroken, match="the other one stands still"):
        work.wait()
    waited_s = time.monotonic() - began_s
    began_s = time.monotonic()
    transport.close()
    return {"waited_s": waited_s, "closed_s": time.monotonic() - began_s, "left": len(transport._in_flight)}


def from_one_that_goes_on() -> dict[str, object]:
    """Far more than fits into the buffers of a connection, to a rank that stands still."""
    return _broadcast(torch.ones(1 << 25))


def test_a_message_to_a_rank_that_stands_still_does_not_hold_up_the_next_view() -> None:
    results = run_processes(
        f"{__name__}:from_one_that_goes_on",
        world_size=2,
        send_signal=SignalAfterLine(rank=1, line="posted", signal=signal.SIGSTOP),
        timeout_s=60,
    )
    assert results[0].value["waited_s"] < 10
    assert results[0].value["closed_s"] < 10
    assert results[0].value["left"] == 0


_ENDS_AT_ONCE = """
import time
from laconic.membership import group

class Slow(list):
    def clear(self):
        time.sleep(1.0)  # as long as Gloo's threads may take to end
        print("destroyed", flush=True)

group._destroy(Slow())
"""


@pytest.mark.slow
def test_a_process_that_ends_waits_until_its_groups_are_destroyed() -> None:
    """A thread that is inside Gloo when the interpreter ends takes the process down with an abort."""
    ended = subprocess.run(
        [sys.executable, "-c", _ENDS_AT_ONCE], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "destroyed\n"
