"""Replicas that average in pairs whenever one of them is ready, in the background of training (AD-PSGD).

Peers never see the model's parameters but a copy of them, z. The optimizer's step is added to z, and what z has become
meanwhile is what the next step starts from:

    after a step     z <- z + (x_after - x_before),   x <- z
    a pair i, j      z_i <- z_i + (s_j - s_i) / 2,    z_j <- z_j + (s_i - s_j) / 2      s: z when it was sent

Whoever is asked answers from a thread that waits for nobody, so no graph and no number of replicas can deadlock.
"""

from __future__ import annotations

import os
import random
import threading
from contextlib import AbstractContextManager

import torch

from laconic.core.caller import Caller
from laconic.core.frames import Frame, new_token
from laconic.core.interface import local_address
from laconic.core.listener import Listener, ReplyTo
from laconic.core.paced import PacedTransport
from laconic.core.plan import Plan
from laconic.core.stateful import ParameterState
from laconic.errors import CommunicationError, PeerLost
from laconic.runtime.agreement import gather_addresses, gather_bytes, meet
from laconic.runtime.buckets import Buckets
from laconic.runtime.edges import Edges, make_edges
from laconic.runtime.job import Job
from laconic.runtime.seams.rounds import nothing_to_accumulate

_AVERAGE, _BYE = 1, 2


class PairwiseSeam:
    """Averages with one neighbour at a time, and lets neighbours average with this replica."""

    def __init__(self, job: Job) -> None:
        self._job = job
        plan = job.fixed_plans()[0]
        self._shared = Buckets(plan, job.strategy, job.parameters, {})
        self._before = [torch.empty_like(flat) for flat in self._shared.flats]
        self._before_views = {
            name: view
            for index, flat in enumerate(self._before)
            for name, view in self._shared.views_of(index, flat).items()
        }
        self._lock = threading.Lock()
        self.adopt()
        self._edges: Edges = make_edges(job, self._shared)
        self._callers: dict[int, Caller] = {}
        self._listener: Listener | None = None
        self._error: CommunicationError | None = None
        self._said_goodbye: set[int] = set()
        self._all_said_goodbye = threading.Event()
        self._stopping = False
        self._ready = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._choose = random.Random(job.transport.rank)
        self._thread: threading.Thread | None = None
        try:
            self._connect()
        except BaseException:
            self._close()
            raise

    def _connect(self) -> None:
        transport = self._job.transport
        token = gather_bytes(transport, new_token(), "the token of replicas")[0]
        host = "127.0.0.1" if transport.in_process else local_address(os.environ.get("MASTER_ADDR"))
        link = transport.link if isinstance(transport, PacedTransport) else None

        def count(payload: int, overhead: int) -> None:
            transport.traffic.count("payload", "average", payload)
            transport.traffic.count("control", "frames", overhead)

        name = f"replica {transport.rank}"
        self._listener = Listener(self, address=(host, 0), token=token, name=name, count=count, link=link)
        addresses = gather_addresses(transport, [self._listener.address], transport.world_size)
        if not self._edges.answers:
            self._all_said_goodbye.set()
        for peer in self._edges.asks:
            self._callers[peer] = Caller(
                addresses[peer],
                token=token,
                rank=transport.rank,
                timeout_s=transport.timeout_s,
                name=f"replica {peer}",
                count=count,
                link=link,
            )
        meet(transport, "replicas being connected")
        self._thread = threading.Thread(target=self._run, name="laconic-pairwise", daemon=True)
        self._thread.start()

    # -- in the background -------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._ready.wait()
            self._ready.clear()
            if self._stopping or not self._callers:
                self._idle.set()
                return
            peer = self._choose.choice(list(self._callers))
            try:
                with self._lock, torch.no_grad():
                    step = self._job.step
                    sent = self._edges.ask(peer, step)
                what = f"averaging with replica {peer}"
                answer = self._callers[peer].call(_AVERAGE, tensors=sent, note=str(step), what=what).frame
                with self._lock, torch.no_grad():
                    self._edges.take(peer, sent, answer.tensors, _step_of(answer))
            except CommunicationError as exc:
                self._error = exc
                self._idle.set()
                return
            self._idle.set()

    def frame(self, frame: Frame, reply: ReplyTo) -> None:
        """See Handler: a neighbour asks."""
        if frame.kind == _BYE:
            self._said_goodbye.add(frame.sender)
            if self._said_goodbye >= set(self._edges.answers):
                self._all_said_goodbye.set()
            reply(frame.answer())
            return
        if frame.sender not in self._edges.answers:
            raise CommunicationError(f"replica {self._job.transport.rank} has no neighbour {frame.sender}.")
        with self._lock, torch.no_grad():
            step = self._job.step
            own = self._edges.ask(frame.sender, step)
            self._edges.take(frame.sender, own, frame.tensors, _step_of(frame))
        reply(frame.answer(own, str(step)))

    def left(self, sender: int, reason: str) -> None:
        """See Handler: a neighbour that goes without a word ends training here too."""
        if sender not in self._said_goodbye and not self._stopping and self._error is None:
            self._error = PeerLost(
                f"averaging on rank {self._job.transport.rank} cannot go on: rank {sender} {reason} before the end of "
                "training."
            )
            self._all_said_goodbye.set()

    # -- around the optimizer's step ---------------------------------------------------------------------------

    def before_step(self, *, closure: bool) -> None:
        """See Seam."""
        if self._error is not None:
            raise self._error
        with torch.no_grad():
            for name, view in self._before_views.items():
                view.copy_(self._job.parameters[name])

    def after_step(self) -> None:
        """Add this step to what others see, and take over what they have made of it."""
        with self._lock, torch.no_grad():
            for name, shared in self._shared.views.items():
                shared.add_(self._job.parameters[name]).sub_(self._before_views[name])
                self._job.parameters[name].copy_(shared)
        if self._idle.is_set() and self._callers:
            self._idle.clear()
            self._ready.set()

    def _pause(self, what: str) -> None:
        """Return when no replica averages any more."""
        deadline = self._job.transport.timeout_s
        if not self._idle.wait(deadline + 5.0):
            raise CommunicationError(f"{what}: averaging with a neighbour did not end in {deadline:g} s.")
        if self._error is not None:
            raise self._error
        meet(self._job.transport, what)

    def wait(self) -> None:
        """See Seam."""
        self._idle.wait(self._job.transport.timeout_s)

    def settle(self) -> None:
        """See Seam."""
        self._pause("all replicas at rest")
        with self._lock, torch.no_grad():
            for name, shared in self._shared.views.items():
                self._job.parameters[name].copy_(shared)

    def adopt(self) -> None:
        """See Seam."""
        with self._lock, torch.no_grad():
            for name, shared in self._shared.views.items():
                shared.copy_(self._job.parameters[name])

    def accumulating(self) -> AbstractContextManager[object]:
        """See Seam."""
        return nothing_to_accumulate()

    def plan(self) -> Plan:
        """See Seam."""
        return self._shared.plan

    def state(self) -> ParameterState:
        """See Seam; every rank calls it at the same time, so that no pair is half-way."""
        self.settle()
        state = self._edges.state()
        meet(self._job.transport, "all states being saved")
        return state

    def order(self) -> list[str]:
        """See Seam; there is no order to know."""
        return []

    def load(self, saved: ParameterState, order: list[str], step: int) -> None:
        """See Seam."""
        self._pause("all replicas at rest")
        self.adopt()
        with self._lock:
            self._edges.load(saved)
        meet(self._job.transport, "all states being loaded")

    def detach(self) -> None:
        """Say goodbye; answer neighbours until they have, too."""
        timeout_s = self._job.transport.timeout_s
        try:
            if self._error is None and self._thread is not None and self._idle.wait(timeout_s):
                for caller in self._callers.values():
                    caller.call(_BYE, what="goodbye").wait()
                self._all_said_goodbye.wait(timeout_s)
        finally:
            self._close()

    def _close(self) -> None:
        self._stopping = True
        self._ready.set()
        for caller in self._callers.values():
            caller.close()
        if self._listener is not None:
            self._listener.close()
        if self._thread is not None:
            self._thread.join(timeout=5.0)


def _step_of(frame: Frame) -> int:
    if not frame.note.isdigit():
        raise CommunicationError(f'replica {frame.sender} did not say in which step it is, but "{frame.note[:40]}".')
    return int(frame.note)
