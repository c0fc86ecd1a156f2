"""A slow link in software: a transport that delays its operations, for machines that cannot shape a real link.

    due = max(free, now) + 8 * sent / bandwidth          free = due          done at due + delay

`sent` are the bytes that this rank sends in the operation, as counted by the inner transport; operations queue behind
each other on the rank's one link. Values, order and byte counts are unchanged. Limits: a rank waits for its own link
only, so a rank that only receives is not delayed, and a slow peer delays the next operation, not this one; traffic
outside the transport is not delayed at all. On a GPU the host waits, where otherwise only the stream would.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from laconic.core.clock import Clock, WallClock
from laconic.core.hosts import Hosts
from laconic.core.transport import DoneWork, Purpose, ReduceOp, Traffic, Transport, Work
from laconic.errors import AttachError, CommunicationError, InvalidSetting, LaconicError
from laconic.units import format_rate, human_bytes, parse_quantity

PACE_VARIABLE = "LACONIC_PACE"
"""The environment variable from which attach() takes the rate of this rank's link, e.g. 100mbit."""
_SLICE_S = 0.5
"""Poll interval of a wait for failed peers."""


class PacedLink:
    """The link of one rank: computes when bytes sent now would have left."""

    def __init__(self, bandwidth_bps: float, *, delay_s: float = 0.0, clock: Clock | None = None) -> None:
        if not (math.isfinite(bandwidth_bps) and bandwidth_bps > 0):
            raise LaconicError(f"the bandwidth of a paced link must be > 0 and finite, got {bandwidth_bps:g}.")
        if not (math.isfinite(delay_s) and delay_s >= 0):
            raise LaconicError(f"the delay of a paced link must be >= 0 and finite, got {delay_s:g}.")
        self.bandwidth_bps = bandwidth_bps
        self.delay_s = delay_s
        self.clock = clock or WallClock()
        self._lock = threading.Lock()
        self._free_s = -math.inf

    def __str__(self) -> str:
        return f"paced at {format_rate(self.bandwidth_bps)}"

    def reserve(self, nbytes: int) -> float:
        """Queue `nbytes` behind those in flight; returns the time at which they arrive."""
        with self._lock:
            now_s = self.clock.now()
            if not nbytes:
                return now_s + self.delay_s  # nothing to queue
            self._free_s = max(self._free_s, now_s) + 8 * nbytes / self.bandwidth_bps
            return self._free_s + self.delay_s


def link_from_environment(environment: Mapping[str, str]) -> PacedLink | None:
    """The link that LACONIC_PACE describes, if it is set."""
    text = environment.get(PACE_VARIABLE)
    if text is None:
        return None
    where = f"the environment variable {PACE_VARIABLE}"
    try:
        bandwidth_bps = parse_quantity(text, "rate", where)
    except InvalidSetting as exc:
        raise AttachError(f"{exc} Set a rate, or unset the variable to run without a limit.") from exc
    if not bandwidth_bps > 0:
        raise AttachError(f'{where} must be > 0, got "{text}". Unset the variable to run without a limit.')
    return PacedLink(bandwidth_bps)


class PacedTransport:
    """Any transport behind a paced link."""

    def __init__(self, inner: Transport, link: PacedLink, *, timeout_s: float = 300.0) -> None:
        self.inner = inner
        self.link = link
        self.timeout_s = timeout_s
        """An operation that takes longer than this on the link raises, as it would on a real link."""

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def world_size(self) -> int:
        return self.inner.world_size

    @property
    def traffic(self) -> Traffic:
        return self.inner.traffic

    @property
    def description(self) -> str:
        return f"{self.inner.description}, {self.link}"

    @property
    def hosts(self) -> Hosts:
        return self.inner.hosts

    @property
    def control_device(self) -> torch.device:
        return self.inner.control_device

    @property
    def in_process(self) -> bool:
        return self.inner.in_process

    @property
    def is_open(self) -> bool:
        return self.inner.is_open

    def waits_on_stream(self, device: torch.device) -> bool:
        return False

    def _hold(self, start: Callable[[], Work], operation: str, what: str) -> Work:
        before = self.traffic.total_bytes
        work = start()
        if isinstance(work, DoneWork):
            return work
        # One thread sends, so the difference is the wire bytes of this operation.
        return _PacedWork(work, self, self.traffic.total_bytes - before, f"{operation} of {what or 'a tensor'}")

    def all_reduce(
        self, tensor: torch.Tensor, *, op: ReduceOp = "sum", purpose: Purpose = "payload", what: str = ""
    ) -> Work:
        return self._hold(
            lambda: self.inner.all_reduce(tensor, op=op, purpose=purpose, what=what), f"all_reduce({op})", what
        )

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, purpose: Purpose = "payload", what: str = "") -> Work:
        return self._hold(
            lambda: self.inner.broadcast(tensor, source=source, purpose=purpose, what=what),
            f"broadcast({source})",
            what,
        )

    def all_gather(
        self, output: torch.Tensor, tensor: torch.Tensor, *, purpose: Purpose = "payload", what: str = ""
    ) -> Work:
        return self._hold(lambda: self.inner.all_gather(output, tensor, purpose=purpose, what=what), "all_gather", what)

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, *, purpose: Purpose = "payload", what: str = ""
    ) -> Work:
        return self._hold(
            lambda: self.inner.reduce_scatter(output, tensor, purpose=purpose, what=what), "reduce_scatter", what
        )

    def all_to_all(
        self, output: torch.Tensor, tensor: torch.Tensor, *, purpose: Purpose = "payload", what: str = ""
    ) -> Work:
        return self._hold(lambda: self.inner.all_to_all(output, tensor, purpose=purpose, what=what), "all_to_all", what)

    def send_receive(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
        *,
        purpose: Purpose = "payload",
        what: str = "",
    ) -> Work:
        return self._hold(
            lambda: self.inner.send_receive(sends, receives, purpose=purpose, what=what), "send_receive", what
        )

    def tally(self, name: str, amount: int) -> int:
        """A few bytes to the job's store are not paced."""
        return self.inner.tally(name, amount)

    def drop_tally(self, name: str) -> None:
        self.inner.drop_tally(name)

    def acquire(self) -> None:
        self.inner.acquire()

    def release(self) -> None:
        self.inner.release()

    def set_status(self, status: str, *, exchange: int | None = None) -> None:
        self.inner.set_status(status, exchange=exchange)

    def compare_steps(self, passes: int, step: int, *, last: bool = False) -> None:
        self.inner.compare_steps(passes, step, last=last)

    def gather_texts(self, text: str, *, what: str, exchange: int, advice: str) -> list[str]:
        """Texts are too small to be paced."""
        return self.inner.gather_texts(text, what=what, exchange=exchange, advice=advice)

    def wait_for(self, event: threading.Event, what: str, *, heard_s: Callable[[], float]) -> None:
        self.inner.wait_for(event, what, heard_s=heard_s)

    def waiting_until(self, deadline_s: float) -> AbstractContextManager[None]:
        return self.inner.waiting_until(deadline_s)

    def silent_rank(self, operation: str) -> int | None:
        return self.inner.silent_rank(operation)

    def known_failure(self) -> CommunicationError | None:
        return self.inner.known_failure()

    def raise_if_peer_failed(self) -> None:
        self.inner.raise_if_peer_failed()

    def announce_failure(self, reason: str, *, rank: int | None = None) -> None:
        self.inner.announce_failure(reason, rank=rank)

    def close(self) -> None:
        self.inner.close()


class _PacedWork:
    """Done when the inner work is done, but not before its bytes would have left."""

    def __init__(self, work: Work, transport: PacedTransport, sent: int, operation: str) -> None:
        self._work = work
        self._transport = transport
        self._sent = sent
        self._operation = operation
        self._began_s = transport.link.clock.now()
        self._due_s = transport.link.reserve(sent)

    def wait(self) -> None:
        transport, clock = self._transport, self._transport.link.clock
        self._work.wait()
        takes_s = self._due_s - self._began_s
        if takes_s > transport.timeout_s:
            problem = (
                f"{self._operation} on rank {transport.rank}: {human_bytes(self._sent)} behind what was queued before "
                f"need {takes_s:.3g} s on a link {transport.link}, more than the {transport.timeout_s:g} s allowed"
            )
            transport.announce_failure(problem)
            raise CommunicationError(f"{problem}. Send less, use a faster link or allow more time.")
        while (left_s := self._due_s - clock.now()) > 0:
            lost = transport.known_failure()
            if lost is not None:
                raise lost
            time.sleep(min(left_s, _SLICE_S))

    def done(self) -> bool:
        return self._transport.link.clock.now() >= self._due_s and self._work.done()
