"""What the tests of frames, listeners and callers share."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from laconic.core.caller import Caller
from laconic.core.frames import Frame
from laconic.core.listener import Listener, ReplyTo

TOKEN = bytes(range(16))
LOCAL = ("127.0.0.1", 0)
ECHO, KEEP, RAISE = 1, 2, 3


class Recorder:
    """Echoes, keeps replies for later, or raises, as the kind of a frame asks; remembers who left."""

    def __init__(self) -> None:
        self.kept: list[tuple[Frame, ReplyTo]] = []
        self.gone: list[tuple[int, str]] = []

    def frame(self, frame: Frame, reply: ReplyTo) -> None:
        if frame.kind == KEEP:
            self.kept.append((frame, reply))
        elif frame.kind == RAISE:
            raise ValueError("no such\nshard")
        else:
            reply(frame.answer(frame.tensors, frame.note))

    def left(self, sender: int, reason: str) -> None:
        self.gone.append((sender, reason))


def listener(handler: Recorder | None = None, **options: object) -> Listener:
    return Listener(handler or Recorder(), **({"address": LOCAL, "token": TOKEN, "name": "server 7"} | options))  # type: ignore[arg-type]


def caller(server: Listener, rank: int = 0, **options: object) -> Caller:
    return Caller(server.address, **({"token": TOKEN, "rank": rank, "timeout_s": 10.0, "name": "server 7"} | options))  # type: ignore[arg-type]


def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.005)
    return True


def held() -> tuple[set[threading.Thread], int]:
    """Threads and number of descriptors of this process."""
    return set(threading.enumerate()), len(list(Path("/proc/self/fd").iterdir()))


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """No thread and no descriptor more than before."""
    threads, descriptors = held()
    yield
    assert eventually(lambda: held()[0] <= threads), held()[0] - threads
    assert eventually(lambda: held()[1] <= descriptors), (held()[1], descriptors)
