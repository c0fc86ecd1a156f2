"""Garbage and damaged frames against a listening socket, and what is left of it afterwards.

    python -m benchmarks.fuzz_server [--frames 100000] [--seed 0]

Half of what is sent are random bytes, half are valid frames in which bytes were changed, cut off or added. A rank with
the right token calls all the while, and every answer it gets must carry the values it sent. Exits with 1 if one does
not, or if threads or descriptors are left.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from laconic.core.caller import Caller
from laconic.core.connection import Address
from laconic.core.frames import Frame, new_token, pack
from laconic.core.listener import Listener, ReplyTo
from laconic.errors import CommunicationError
from laconic.units import human_bytes

_LIMIT_BYTES = 2**20
_CHECK_EVERY = 100
_WARM_UP = 500


class Echo:
    """Answers every request with its own tensors."""

    def frame(self, frame: Frame, reply: ReplyTo) -> None:
        """Send back what came."""
        reply(frame.answer(frame.tensors))

    def left(self, sender: int, reason: str) -> None:
        """Nobody is missed."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What was sent and what became of the server."""

    frames: int
    answered: int
    """Damaged frames that still were valid: bytes changed in a tensor, a key, a number."""
    checks: int
    """Calls with the right token in between."""
    failed_checks: int
    log_lines: int
    memory_growth_bytes: int
    threads_left: int
    descriptors_left: int
    seconds: float

    @property
    def refused(self) -> int:
        """Frames that ended their connection without an answer."""
        return self.frames - self.answered

    @property
    def passed(self) -> bool:
        """Whether the server lived on and left nothing behind."""
        return not (self.failed_checks or self.threads_left or self.descriptors_left)


def fuzz(num_frames: int, *, seed: int = 0) -> Summary:
    """Send `num_frames` frames of garbage to a listener of this process."""
    rng = random.Random(seed)
    token = new_token()
    lines = _Lines()
    log = logging.getLogger("laconic")
    log.addHandler(lines)
    propagate, log.propagate = log.propagate, False
    threads, descriptors = threading.active_count(), _descriptors()
    answered = checks = failed = memory = 0
    began_s = time.perf_counter()
    try:
        with Listener(Echo(), address=("127.0.0.1", 0), token=token, limit_bytes=_LIMIT_BYTES, name="fuzzed") as server:
            with Caller(server.address, token=token, rank=0, timeout_s=10, name="fuzzed") as caller:
                for number in range(num_frames):
                    if number == min(_WARM_UP, num_frames // 2):
                        memory = _resident_bytes()
                    garbage = rng.randbytes(rng.randrange(1, 300)) if number % 2 else _damaged(rng, token)
                    answered += _send(server.address, garbage)
                    if number % _CHECK_EVERY == 0:
                        checks += 1
                        failed += not _answers(caller, number)
            memory = _resident_bytes() - memory
    finally:
        log.removeHandler(lines)
        log.propagate = propagate
    return Summary(
        frames=num_frames,
        answered=answered,
        checks=checks,
        failed_checks=failed,
        log_lines=lines.count,
        memory_growth_bytes=memory,
        threads_left=threading.active_count() - threads,
        descriptors_left=_descriptors() - descriptors,
        seconds=time.perf_counter() - began_s,
    )


def _damaged(rng: random.Random, token: bytes) -> bytes:
    dtype = rng.choice([torch.float32, torch.bool, torch.int64, torch.bfloat16])
    tensors = tuple(torch.zeros(rng.randrange(50), dtype=dtype) for _ in range(rng.randrange(4)))
    frame = Frame(rng.randrange(4), rng.randrange(4), rng.randrange(100), 0, "n" * rng.randrange(20), tensors)
    data = bytearray(b"".join(pack(frame, token)))
    for _ in range(rng.randrange(1, 4)):
        match rng.randrange(4):
            case 0 | 1:
                data[rng.randrange(len(data))] = rng.randrange(256)
            case 2:
                data = data[: rng.randrange(1, len(data) + 1)]
            case _:
                place = rng.randrange(len(data) + 1)
                data[place:place] = rng.randbytes(rng.randrange(1, 20))
    return bytes(data)


def _send(address: Address, data: bytes) -> bool:
    """Whether the listener answered before it ended the connection."""
    with socket.create_connection(address, timeout=10) as sock:
        # Without a linger the ports of a hundred thousand connections would all wait a minute to be used again.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            return bool(sock.recv(1))
        except TimeoutError:
            raise  # the listener hangs, which is what this looks for
        except OSError:
            return False  # it was refused before all of it was sent


def _answers(caller: Caller, number: int) -> bool:
    values = torch.arange(number, number + 1000)
    try:
        return torch.equal(caller.call(1, tensors=[values]).frame.tensors[0], values)
    except CommunicationError as exc:
        print(exc, file=sys.stderr)
        return False


class _Lines(logging.Handler):
    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    summary = fuzz(options.frames, seed=options.seed)
    print(f"frames sent          {summary.frames} in {summary.seconds:.1f} s")
    print(f"refused              {summary.refused}; the other {summary.answered} were still valid and were answered")
    print(f"server still answers {summary.checks - summary.failed_checks} of {summary.checks} calls in between")
    print(f"memory growth        {human_bytes(max(0, summary.memory_growth_bytes))}")
    print(f"threads left         {summary.threads_left}")
    print(f"descriptors left     {summary.descriptors_left}")
    print(f"log lines            {summary.log_lines}")
    sys.exit(0 if summary.passed else 1)


if __name__ == "__main__":
    main()
