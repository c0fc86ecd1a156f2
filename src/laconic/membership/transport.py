"""The transport of one view: a fixed set of ranks over a group that is cut when the view is over."""

from __future__ import annotations

import math
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import OpType  # pyrefly: ignore[missing-module-attribute]

from laconic.core.group_operations import GroupOperations, Issue
from laconic.core.hosts import Hosts, hosts_of, name_of_host
from laconic.core.transport import Purpose, Traffic, Work
from laconic.errors import CommunicationError, one_line
from laconic.membership.group import CuttableGroup, connect
from laconic.membership.member import Member
from laconic.membership.view import View, ViewBroken

_ENDING_S = 10.0
"""How long operations on an aborted group may take to end, or to become idle."""
_PAUSE_S = 0.02
_DEVICE_PAUSE_S = 50e-6
_LOOK_S = 0.2
"""How often a wait checks whether the view is over, in case Gloo does not notice."""


class ViewTransport(GroupOperations):
    """One member of a view, or of a subset of one."""

    def __init__(
        self,
        member: Member,
        view: View,
        traffic: Traffic,
        *,
        cuda: bool,
        members: Sequence[str] = (),
        part: str = "all",
    ) -> None:
        """members: a subset of the view, named `part`; default: all members."""
        names = tuple(members) or view.members
        self._member = member
        self._view = view
        self._part = part
        self.timeout_s = member.timeout_s
        self.in_process = False
        self.link = None
        self.rank = names.index(member.name)
        self.world_size = len(names)
        self.traffic = traffic
        self._backends = {"cpu": "gloo", "cuda": "nccl"} if cuda else {"cpu": "gloo"}
        self.control_device = torch.device("cpu")
        self.description = f"view {view.number}, {'Gloo and NCCL' if cuda else 'Gloo'}, {self.world_size} ranks"
        self.hosts: Hosts = ((0,),)
        self._in_flight: dict[dist.Work, str] = {}
        """Operations that may still write to tensors, each with its device type."""
        self._waiter: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._woken: threading.Event | None = None
        self._group: CuttableGroup | None = None
        if self.world_size > 1:
            self._connect(cuda)

    @property
    def is_open(self) -> bool:
        return self.world_size == 1 or self._group is not None

    def _connect(self, cuda: bool) -> None:
        number = self._view.number
        place = f"group/{number}/{self._part}"
        self._group = connect(
            lambda: CuttableGroup(
                self._member.address,
                place,
                rank=self.rank,
                world_size=self.world_size,
                cuda=cuda,
                timeout_s=self.timeout_s,
            ),
            call_when_over=lambda cut: self._member.call_when_over(number, cut),
            what=f"view {number}",
        )
        self._member.call_when_over(number, self._group.cut)
        self.hosts = hosts_of(self._names_of_hosts())

    def _names_of_hosts(self) -> list[str]:
        name = name_of_host().encode()[:256].ljust(256)
        mine = torch.frombuffer(bytearray(name), dtype=torch.uint8)
        rows = torch.empty((self.world_size, len(mine)), dtype=torch.uint8)
        self.all_gather(rows, mine, purpose="control", what="names of hosts").wait()
        return [bytes(row.tolist()).decode(errors="replace").strip() for row in rows]

    def _start(
        self,
        issue: Issue,
        device: torch.device,
        *,
        operation: str,
        sent: int,
        purpose: Purpose,
        what: str,
        peers: bool = False,
    ) -> Work:
        label = f"{operation} of {what or 'a tensor'}"
        group = self._group.group if self._group is not None else None
        if group is None:
            raise CommunicationError("the transport is closed; attach again to communicate.")
        self.raise_if_over(label)
        self.traffic.count(purpose, operation, sent)
        try:
            works = issue(group)
        except RuntimeError as exc:
            raise self.failed(label, exc) from exc
        started = [works] if isinstance(works, dist.Work) else list(works or [])
        # A send only reads, so one that does not end after a shutdown of the connection may be left waiting.
        self._in_flight |= {work: device.type for work in started if not _is_send(work)}
        if device.type == "cuda":
            return _DeviceWork(self, started, label)
        if peers:
            return _PeerWork(self, started, label)
        return _HostWork(self, started, label, look_s=_LOOK_S)

    def wait_elsewhere(self, wait: Callable[[], None]) -> threading.Event:
        """Call `wait` on another thread; the event is set when it has returned, or when the view is over.

        Gloo does not end a send when its connection is shut down, so a wait for one must be able to give up.
        """
        if self._waiter is None:
            self._waiter = queue.SimpleQueue()
            run = lambda waiter: [one() for one in iter(waiter.get, None)]  # noqa: E731
            threading.Thread(target=run, args=(self._waiter,), name="laconic-messages", daemon=True).start()
            self._member.call_when_over(self._view.number, self._turn_away)
        woken = threading.Event()

        def waited() -> None:
            wait()
            woken.set()

        self._woken = woken
        self._waiter.put(waited)
        if self._member.why_over(self._view.number) is not None:
            woken.set()
        return woken

    def _turn_away(self) -> None:
        if self._woken is not None:
            self._woken.set()

    def ended(self, work: dist.Work) -> None:
        """An operation has been waited for."""
        self._in_flight.pop(work, None)

    def raise_if_over(self, operation: str) -> None:
        """Raise if this view is over."""
        why = self._member.why_over(self._view.number)
        if why is not None:
            raise self._member.lost or ViewBroken(f"{operation} in view {self._view.number}: {why}")

    def failed(self, operation: str, exc: Exception) -> CommunicationError:
        """The error for a failed operation: the view is over, with the reason if it is known."""
        if self._member.lost is not None:
            return self._member.lost
        why = self._member.why_over(self._view.number) or f"a connection broke ({_reason(exc)})"
        return ViewBroken(f"{operation} in view {self._view.number}: {why}")

    def timed_out(self, operation: str) -> CommunicationError:
        """The error for an operation that timed out although all members are alive."""
        return CommunicationError(
            f"{operation} on rank {self.rank} did not finish in {self.timeout_s:g} s. Every member of view "
            f"{self._view.number} ({', '.join(self._view.members)}) must come to the same exchange."
        )

    # -- the rest of the contract ----------------------------------------------------------------------------------

    def tally(self, name: str, amount: int) -> int:
        """Raise: no strategy that may be attached here uses a tally."""
        raise CommunicationError(f'"{name}" cannot be counted while the set of ranks may change.')

    def drop_tally(self, name: str) -> None:
        """Do nothing, as nothing is counted."""

    def acquire(self) -> None:
        """Do nothing: this transport is made for one session."""

    def release(self) -> None:
        """Do nothing: this transport is made for one session."""

    def set_status(self, status: str, *, exchange: int | None = None) -> None:
        """Do nothing: the keeper knows who is missing."""

    def compare_steps(self, passes: int, step: int, *, last: bool = False) -> None:
        """Do nothing: members compare their units in every vote."""

    def gather_texts(self, text: str, *, what: str, exchange: int, advice: str) -> list[str]:
        """Only this rank's text: members agree in units, so there is no need to compare operations."""
        return [text]

    def wait_for(self, event: threading.Event, what: str, *, heard_s: Callable[[], float]) -> None:
        while not event.wait(0.05):
            self.raise_if_over(what)
            if time.monotonic() >= heard_s() + self.timeout_s:
                raise self.timed_out(what)

    def waiting_until(self, deadline_s: float) -> AbstractContextManager[None]:
        return nullcontext()

    def silent_rank(self, operation: str) -> int | None:
        """None: the keeper detects silent ranks."""
        self.raise_if_over(operation)
        return None

    def known_failure(self) -> CommunicationError | None:
        return self._member.lost

    def raise_if_peer_failed(self) -> None:
        if self._member.lost is not None:
            raise self._member.lost

    def announce_failure(self, reason: str, *, rank: int | None = None) -> None:
        """Tell the keeper, unless the job is over or this worker has left it."""
        if self._member.lost is None and not self._member.closed:
            with suppress(CommunicationError):
                self._member.raised(reason.removeprefix("raised "))

    def close(self) -> None:
        """End every operation first, so that none of them writes into a tensor later."""
        group, self._group = self._group, None
        if group is None:
            return
        if self._waiter is not None:
            self._waiter.put(None)
        group.cut()
        until_s = time.monotonic() + _ENDING_S
        over = self._has_ended(group)
        while not over and time.monotonic() < until_s:
            time.sleep(_PAUSE_S)
            over = self._has_ended(group)
        self._in_flight.clear()
        if over and "cuda" in self._backends:
            torch.cuda.synchronize()  # what was in the streams behind them has ended, too
        group.close()
        if not over:
            # It could still write to a tensor that is about to be restored.
            raise CommunicationError(
                f"an operation of view {self._view.number} did not end {_ENDING_S:g} s after its connections were cut."
            )

    def _has_ended(self, group: CuttableGroup) -> bool:
        """Whether no operation of an aborted group writes to a tensor any more."""
        left = [device for work, device in self._in_flight.items() if not work.is_completed()]
        if "cuda" in left or (left and not group.is_still()):
            return False
        # A thread that Gloo is about to wake looks idle for a moment.
        time.sleep(_PAUSE_S if left else 0.0)
        return not left or group.is_still()


def _reason(exc: Exception) -> str:
    """A backend's message without its source location and advice."""
    said = re.sub(r"^\[\S+\]\s*", "", str(exc))
    return one_line(said.partition(". ")[0], 100)


def _is_send(work: dist.Work) -> bool:
    return work._get_op_type() == OpType.SEND  # pyrefly: ignore[missing-attribute]


class _HostWork:
    """Operations the host waits for; they fail at once when the view is over."""

    def __init__(
        self, transport: ViewTransport, works: list[dist.Work], operation: str, *, look_s: float = math.inf
    ) -> None:
        """look_s: poll interval for the end of the view. Not for sends and receives: Gloo ends them, and all
        connections, when a wait for them times out.
        """
        self._transport = transport
        self._works = works
        self._operation = operation
        self._look_s = look_s
        self._waited = False
        self._deadline_s = time.monotonic() + transport.timeout_s

    def wait(self) -> None:
        while self._works:
            work = self._works[0]
            left_s = max(0.001, self._deadline_s - time.monotonic())
            had_ended = work.is_completed()
            try:
                work.wait(timedelta(seconds=min(left_s, self._look_s)))
            except RuntimeError as exc:
                if had_ended or (self._look_s == math.inf and time.monotonic() < self._deadline_s):
                    raise self._transport.failed(self._operation, exc) from exc
                if not work.is_completed():
                    self._transport.raise_if_over(self._operation)
                    if time.monotonic() >= self._deadline_s:
                        raise self._transport.timed_out(self._operation) from exc
                continue
            self._transport.ended(work)
            del self._works[0]
        self._waited = True

    def done(self) -> bool:
        return self._waited or all(work.is_completed() for work in self._works)


class _PeerWork:
    """Sends and receives between two ranks."""

    def __init__(self, transport: ViewTransport, works: list[dist.Work], operation: str) -> None:
        self._transport = transport
        self._inner = _HostWork(transport, works, operation)
        self._operation = operation
        self._problems: list[CommunicationError] = []
        self._over = False

    def wait(self) -> None:
        if not self._over:
            self._transport.wait_elsewhere(self._wait).wait()
        if self._problems:
            raise self._problems[0]
        if not self._over:
            self._transport.raise_if_over(self._operation)

    def _wait(self) -> None:
        try:
            self._inner.wait()
            self._over = True
        except CommunicationError as exc:
            self._problems.append(exc)

    def done(self) -> bool:
        # Gloo knows only after a wait.
        return self._over


class _DeviceWork:
    """Operations that run on the device; the host waits for them, too.

    An operation that was aborted ends like any other, but the data it received is garbage. Kernels already in the
    stream would read it, and indices that are garbage end the whole process.
    """

    def __init__(self, transport: ViewTransport, works: list[dist.Work], operation: str) -> None:
        self._transport = transport
        self._works = works
        self._operation = operation
        self._deadline_s = time.monotonic() + transport.timeout_s

    def wait(self) -> None:
        while self._works:
            work = self._works[0]
            try:
                work.wait()  # the current stream waits
            except RuntimeError as exc:
                raise self._transport.failed(self._operation, exc) from exc
            # NCCL says that an operation has completed as soon as it knows of an error; the stream tells the truth.
            ended = torch.cuda.current_stream().record_event()
            while not ended.query():
                if time.monotonic() >= self._deadline_s:
                    raise self._transport.timed_out(self._operation)
                time.sleep(_DEVICE_PAUSE_S)
            self._transport.raise_if_over(self._operation)
            self._transport.ended(work)
            del self._works[0]

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)
