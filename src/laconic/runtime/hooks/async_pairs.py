"""Replicas that average in pairs whenever one of them is ready, in the background of training (AD-PSGD).

Peers see a copy z of the model's parameters, never the parameters themselves. The change of each optimizer step is
added to z, and the next step starts from z as it is then:

    after a step     z <- z + (x_after - x_before),   x <- z
    a pair i, j      z_i <- z_i + (s_j - s_i) / 2,    z_j <- z_j + (s_i - s_j) / 2      s: z when it was sent

Requests are answered by a thread that never waits for another rank, so no graph and no number of replicas can deadlock.
"""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from laconic.core.caller import Caller, Reply
from laconic.core.frames import Frame, new_token
from laconic.core.interface import local_address
from laconic.core.listener import Listener, ReplyTo
from laconic.core.plan import Plan
from laconic.core.stateful import ParameterState
from laconic.errors import CommunicationError, PeerLost, one_line
from laconic.runtime.agreement import gather_addresses, gather_bytes, meet, with_last_words
from laconic.runtime.buckets import Buckets
from laconic.runtime.hooks.contract import TrainingHooks
from laconic.runtime.job import Job
from laconic.runtime.pairwise_messages import PairwiseMessages, make_pairwise_messages

_AVERAGE, _BYE = 1, 2
_MOST_DIGITS = 15


class AsyncPairHooks(TrainingHooks):
    """Averages with one neighbour at a time, and lets neighbours average with this replica."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
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
        self._messages: PairwiseMessages = make_pairwise_messages(job, self._shared)
        self._callers: dict[int, Caller] = {}
        self._listener: Listener | None = None
        self._error: CommunicationError | None = None
        self._named = False
        """Whether this rank has announced the error to the others itself."""
        self._said_goodbye: set[int] = set()
        self._all_said_goodbye = threading.Event()
        self._heard_s = time.monotonic()
        self._stopping = False
        self._ready = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._choose = random.Random(job.transport.rank)
        self._thread: threading.Thread | None = None
        try:
            self._connect()
        except BaseException:
            self.detach()
            raise

    def _connect(self) -> None:
        transport = self._job.transport
        token = gather_bytes(transport, new_token(), "the token of replicas")[0]
        host = "127.0.0.1" if transport.in_process else local_address(os.environ.get("MASTER_ADDR"))
        link = transport.link
        traffic = transport.traffic

        def count(payload: int, overhead: int) -> None:
            traffic.count("payload", "average", payload)
            traffic.count("control", "frames", overhead)

        name = f"replica {transport.rank}"
        self._listener = Listener(self, address=(host, 0), token=token, name=name, count=count, link=link)
        addresses = gather_addresses(transport, [self._listener.address], transport.world_size)
        if not self._messages.answers:
            self._all_said_goodbye.set()
        for peer in self._messages.asks:
            self._callers[peer] = Caller(
                addresses[peer],
                token=token,
                rank=transport.rank,
                timeout_s=transport.timeout_s,
                name=f"rank {peer}",
                peer=peer,
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
                self._average_with(peer)
            except CommunicationError as exc:
                self._error = self._error or self._lost(peer, exc)
            except Exception as exc:  # noqa: BLE001 - carried to the training thread by before_step()
                self._error = CommunicationError(
                    f"averaging with rank {peer} failed on rank {self._job.transport.rank}: {type(exc).__name__}: "
                    f"{one_line(exc)}."
                )
            failed = self._error is not None
            self._idle.set()
            if failed:  # the flag read earlier: by now it may have been set for the next one
                return

    def _lost(self, peer: int, error: CommunicationError) -> PeerLost:
        """A neighbour did not answer, although its answering thread never waits for another rank."""
        if isinstance(error, PeerLost):
            return error
        self._named = True
        rank = self._job.transport.rank
        self._job.transport.announce_failure(f"did not answer rank {rank}: {one_line(error)}", rank=peer)
        return PeerLost(str(error), rank=peer)

    def _average_with(self, peer: int) -> None:
        with self._lock, torch.no_grad():
            step = self._job.step
            said = self._messages.say(peer, step)
        what = f"averaging with rank {peer} in step {step}"
        answer = self._callers[peer].call(_AVERAGE, tensors=said, note=str(step), what=what).frame
        with self._lock, torch.no_grad():
            self._messages.take(peer, said, self._messages.read(peer, answer.tensors, _step_of(answer)))

    def frame(self, frame: Frame, reply: ReplyTo) -> None:
        """Answer the request of a neighbour."""
        self._heard_s = time.monotonic()
        if frame.kind == _BYE:
            self._said_goodbye.add(frame.sender)
            if self._said_goodbye >= set(self._messages.answers):
                self._all_said_goodbye.set()
            reply(frame.answer())
            return
        rank = self._job.transport.rank
        if frame.kind != _AVERAGE:
            raise CommunicationError(f"rank {rank} knows no request of kind {frame.kind}.")
        if frame.sender not in self._messages.answers:
            raise CommunicationError(f"rank {rank} has no neighbour {frame.sender} that it answers.")
        with self._lock, torch.no_grad():
            # Everything is checked before anything changes.
            meant = self._messages.read(frame.sender, frame.tensors, _step_of(frame))
            step = self._job.step
            said = self._messages.say(frame.sender, step)
            self._messages.take(frame.sender, said, meant)
        reply(frame.answer(said, str(step)))

    def left(self, sender: int, reason: str) -> None:
        """A neighbour whose connection breaks without a goodbye ends training here too."""
        outsider = sender not in self._messages.answers
        if not outsider and sender not in self._said_goodbye and not self._stopping and self._error is None:
            self._error = PeerLost(
                f"averaging on rank {self._job.transport.rank} cannot continue: rank {sender} {reason} before the "
                "end of training.",
                rank=sender,
            )
            self._all_said_goodbye.set()

    # -- around the optimizer's step ---------------------------------------------------------------------------

    def before_step(self, *, closure: bool) -> None:
        self._check()
        with torch.no_grad():
            for name, view in self._before_views.items():
                view.copy_(self._job.parameters[name])

    def _check(self) -> None:
        """Raise the error of the background thread, if there is one."""
        if isinstance(self._error, PeerLost) and not self._named:
            self._named = True
            transport = self._job.transport
            self._error = with_last_words(self._error, transport)
            # Before this rank ends: ranks that wait elsewhere must not take it for the cause.
            problem = f"was lost, says rank {transport.rank}: {one_line(self._error)}"
            transport.announce_failure(problem, rank=self._error.rank)
        if self._error is not None:
            raise self._error

    def after_step(self) -> None:
        """Add this step to the shared copy, and continue from the copy as neighbours have changed it."""
        with self._lock, torch.no_grad():
            for name, shared in self._shared.views.items():
                shared.add_(self._job.parameters[name]).sub_(self._before_views[name])
                self._job.parameters[name].copy_(shared)
        if self._idle.is_set() and self._callers and self._error is None:
            self._idle.clear()
            self._ready.set()

    def _pause(self, what: str) -> None:
        """Return when no replica averages any more."""
        deadline = self._job.transport.timeout_s
        if not self._idle.wait(deadline + 5.0):
            raise CommunicationError(f"{what}: averaging with a neighbour did not end in {deadline:g} s.")
        self._check()
        meet(self._job.transport, what)

    def wait(self) -> None:
        self._idle.wait(self._job.transport.timeout_s)

    def settle(self) -> None:
        self._pause("all replicas at rest")
        with self._lock, torch.no_grad():
            for name, shared in self._shared.views.items():
                self._job.parameters[name].copy_(shared)

    def adopt(self) -> None:
        with self._lock, torch.no_grad():
            for name, shared in self._shared.views.items():
                shared.copy_(self._job.parameters[name])

    def plan(self) -> Plan:
        return self._shared.plan

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        self.settle()
        yield
        meet(self._job.transport, "all states being saved")

    def state(self) -> ParameterState:
        with self._lock:
            return self._messages.state()

    def load(self, saved: ParameterState, order: list[str], step: int) -> None:
        self._pause("all replicas at rest")
        self.adopt()
        with self._lock:
            self._messages.load(saved)
        meet(self._job.transport, "all states being loaded")

    def leave(self, at_most_s: float = math.inf) -> None:
        """Say goodbye; answer neighbours until they have said it too, as long as they make steps."""
        self._idle.wait(self._job.transport.timeout_s + 5.0)
        self._check()
        self._say_goodbye()
        self._check()
        if math.isfinite(at_most_s):
            self._all_said_goodbye.wait(at_most_s)
        else:
            self._job.transport.wait_for(self._all_said_goodbye, "detaching", heard_s=lambda: self._heard_s)
        self._check()

    def _say_goodbye(self) -> None:
        said: dict[int, Reply] = {}
        for peer in (*self._callers, *self._callers):  # send all before waiting for the first answer
            try:
                if peer in said:
                    said[peer].wait()
                else:
                    said[peer] = self._callers[peer].call(_BYE, what="goodbye")
            except CommunicationError as exc:
                self._error = self._error or self._lost(peer, exc)
                return

    def detach(self) -> None:
        """Say goodbye, because neighbours treat a broken connection as a lost rank."""
        self._stopping = True
        self._ready.set()
        for caller in self._callers.values():
            caller.close()
        # Removed, because it references these hooks, and they the transport.
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        if self._thread is not None:
            self._thread.join(timeout=5.0)


def _step_of(frame: Frame) -> int:
    if not (frame.note.isascii() and frame.note.isdigit() and len(frame.note) <= _MOST_DIGITS):
        raise CommunicationError(
            f'rank {frame.sender} did not say in which step it is, but "{one_line(frame.note, 40)}".'
        )
    return int(frame.note)
