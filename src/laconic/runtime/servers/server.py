"""One server: it is configured by rank 0, then serves every rank until the last has said goodbye.

A rank that leaves without a goodbye, or stalls beyond the job's timeout, ends the job for all ranks. The server then
stays for a moment, to tell every rank which one it was.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable

from laconic.compression import NoCompression
from laconic.core.frames import Frame
from laconic.core.listener import ReplyTo
from laconic.errors import CommunicationError, one_line
from laconic.runtime.datagrams import Datagrams
from laconic.runtime.in_network.aggregator import Aggregator
from laconic.runtime.servers.first_pushes import FirstPushes, FirstPushStore
from laconic.runtime.servers.parameter_store import ParameterStore
from laconic.runtime.servers.preparation import prepare
from laconic.runtime.servers.protocol import (
    BYE,
    CONFIGURE,
    GONE,
    JOIN,
    LOST,
    MISSING,
    PULL,
    PUSH,
    REDUCE,
    REST,
    RESTORE,
    SLOTS,
    STATE,
    Configuration,
    patience_s,
)
from laconic.runtime.servers.server_optimizer import check_values
from laconic.runtime.servers.sum_server import SumServer
from laconic.strategy import Strategy

_LOG = logging.getLogger("laconic")
_STAY_S = 10.0
"""How long a server stays after a rank was lost, to report it to the others."""
_Store = ParameterStore | FirstPushStore
MOST_SLOTS = 16384
"""Default number of slots of a server: 47 MB."""


class Server:
    """Handles the frames of one server; see core/listener.py."""

    def __init__(self, name: str, *, host: str = "127.0.0.1", most_slots: int = MOST_SLOTS) -> None:
        """`host`: the address on which it receives frames for slots; `most_slots`: the limit of its memory."""
        self.name = name
        self._host = host
        self._most_slots = most_slots
        self._slots: Aggregator | None = None
        self._tag = secrets.randbits(64)
        self._lock = threading.Lock()
        self._job = ""
        self._about: Configuration | None = None
        self._strategy: Strategy | None = None
        self._parts: dict[int, SumServer | _Store] = {}
        self._first_pushes: FirstPushes | None = None
        self._present: set[int] = set()
        self._strangers: Counter[int] = Counter()
        self._goodbyes: set[int] = set()
        self._lost: str | None = None
        self._lost_s = 0.0
        self._heard_s = time.monotonic()
        self.configured = threading.Event()
        """Set when rank 0 has described the job."""
        self.finished = threading.Event()
        """Set when every rank has said goodbye and disconnected, or the job was lost."""
        self._serve: dict[int, Callable[[Frame, ReplyTo], None]] = {
            JOIN: self._join,
            CONFIGURE: self._configure,
            REDUCE: lambda frame, reply: self._aggregator(frame).add(frame, reply),
            PUSH: lambda frame, reply: self._store(frame).push(frame, reply),
            PULL: lambda frame, reply: reply(frame.answer((self._store(frame).pull(frame.sender),))),
            REST: self._rest,
            STATE: self._state,
            RESTORE: self._restore,
            BYE: self._bye,
            MISSING: self._missing,
            SLOTS: self._tell_slots,
        }

    @property
    def about(self) -> Configuration | None:
        """Rank 0's description of the job."""
        return self._about

    @property
    def lost(self) -> str | None:
        """Why the job cannot continue, if it cannot."""
        return self._lost

    def frame(self, frame: Frame, reply: ReplyTo) -> None:
        serve = self._serve.get(frame.kind)
        if serve is None:
            raise CommunicationError(f"{self.name} knows no request of kind {frame.kind}.")
        if frame.kind != JOIN:
            self._check_sender(frame)
        if frame.kind != MISSING:
            self._heard_s = time.monotonic()
        serve(frame, reply)

    def _check_sender(self, frame: Frame) -> None:
        sender, about = frame.sender, self._about
        if about is not None and sender >= about.world_size:
            raise CommunicationError(f"{self.name} serves {about.world_size} ranks, not rank {sender}.")
        if sender not in self._present:
            raise CommunicationError(f"rank {sender} has not joined the job of {self.name}.")
        if about is None and frame.kind != CONFIGURE:
            raise CommunicationError(f"{self.name} has not been configured by rank 0 yet.")
        if self._lost is not None and frame.kind != BYE:
            raise CommunicationError(LOST + self._lost)
        if sender in self._goodbyes and frame.kind not in (BYE, MISSING):
            raise CommunicationError(f"rank {sender} has already left the job of {self.name}.")

    def left(self, sender: int, reason: str) -> None:
        """End the job for the others if a rank leaves without a goodbye."""
        with self._lock:
            if self._strangers[sender]:
                self._strangers[sender] -= 1
                return
            if sender not in self._present:
                return
            self._present.discard(sender)
        if self._about is None:
            return
        if sender not in self._goodbyes:
            self.lose(f"rank {sender} {reason} {GONE}")
        if not self._present and (self._lost is not None or not self._awaited()):
            self.finished.set()

    def lose(self, reason: str) -> None:
        """Report to every rank, now or at its next request, that the job has failed; the first reason stays."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost, self._lost_s = reason, time.monotonic()
        _LOG.error("%s: %s", self.name, reason)
        for _, part in self._all_parts():
            part.fail(LOST + reason)
        if self._slots is not None:
            self._slots.fail(LOST + reason)
        if not self._present:
            self.finished.set()

    def _all_parts(self) -> list[tuple[int, SumServer | _Store]]:
        """The sums or parameters it serves, by number of bucket; the table may grow meanwhile."""
        with self._lock:
            return list(self._parts.items())

    def _awaited(self) -> list[int]:
        """Ranks that have not said goodbye."""
        assert self._about is not None
        return [rank for rank in range(self._about.world_size) if rank not in self._goodbyes]

    def _join(self, frame: Frame, reply: ReplyTo) -> None:
        with self._lock:
            if self._about is None and not self._present:
                self._job = frame.note
            if frame.note != self._job or frame.sender in self._present:
                # The end of this connection must not be taken for the end of the rank that is served.
                self._strangers[frame.sender] += 1
                raise CommunicationError(f"{self.name} serves another job. Wait for its end, or use other servers.")
            self._present.add(frame.sender)
        reply(frame.answer())

    def _configure(self, frame: Frame, reply: ReplyTo) -> None:
        about = Configuration.read(frame.note)
        strategy = Strategy.parse(about.strategy)
        rule, compression = strategy.synchronization, strategy.compression
        if rule.optimizer_on_servers != bool(about.optimizer):
            raise CommunicationError(f'the strategy "{one_line(about.strategy)}" is configured as another kind of job.')
        parts: dict[int, SumServer | _Store] = {}
        if rule.barrier:  # else each bucket starts with the RESTORE of its parameters
            for number, bucket in about.buckets.items():
                codec = NoCompression() if strategy.architecture.adds_only else compression
                parts[number] = SumServer(bucket, codec, world_size=about.world_size, server=about.server)
        if self._about is None:  # before the first requests, which would wait for it
            prepare(strategy, {bucket.dtype for bucket in about.buckets.values()}, holds=not rule.barrier)
        with self._lock:
            # Buckets may change where sums are formed; a server that holds parameters keeps its own.
            told = self._about
            if told is not None and (not rule.barrier or about.strategy != told.strategy):
                raise CommunicationError(f"{self.name} already serves a job.")
            self._about, self._strategy, self._parts = about, strategy, parts
            self._first_pushes = FirstPushes(about, rule) if rule.takes_first else None
        if told is None:
            self._open_slots(strategy, about.world_size)
            threading.Thread(target=self._watch, name=f"laconic-{self.name}-watch", daemon=True).start()
            self.configured.set()
        reply(frame.answer())

    def _open_slots(self, strategy: Strategy, world_size: int) -> None:
        """Make the pool of slots that the strategy asks for, up to the limit of this server."""
        layout = strategy.architecture.servers
        granted = 0 if layout is None else min(layout.slots, self._most_slots)
        if granted:
            self._slots = Aggregator(
                Datagrams(self._host), num_slots=granted, world_size=world_size, tag=self._tag, name=self.name
            )

    def close(self) -> None:
        """Release all resources; closing twice is fine."""
        if self._slots is not None:
            self._slots.close()

    def _watch(self) -> None:
        """End waits beyond the timeout, waits of workers that are behind, and a job that was lost a while ago."""
        assert self._about is not None
        limit_s = self._about.timeout_s
        longest_s = patience_s(limit_s)
        while not self.finished.wait(self._look_again_s(limit_s)):
            if self._lost is not None:
                if time.monotonic() - self._lost_s > _STAY_S:
                    self.finished.set()
                continue
            if self._first_pushes is not None:
                self._first_pushes.release_late()
            waits = [(f"bucket {number}", part.waiting_for()) for number, part in self._all_parts()]
            if self._slots is not None:
                waits.append(("a sum in slots", self._slots.waiting_for()))
            for where, (waited_s, ranks) in waits:
                if waited_s > longest_s:
                    who = ", ".join(map(str, ranks))
                    self.lose(f"rank {who} stalled at {where} for {waited_s:.3g} s; the limit is {limit_s:g} s")

    def _look_again_s(self, limit_s: float) -> float:
        """The period of the watch: short compared with every wait that it ends."""
        typical_s = None if self._first_pushes is None else self._first_pushes.typical_s
        return min(1.0, limit_s / 50, typical_s or 1.0)

    def _aggregator(self, frame: Frame) -> SumServer:
        part = self._parts.get(frame.key)
        if not isinstance(part, SumServer):
            raise CommunicationError(f"{self.name} forms no sums of bucket {frame.key}.")
        return part

    def _store(self, frame: Frame) -> _Store:
        part = self._parts.get(frame.key)
        if part is None or isinstance(part, SumServer):
            raise CommunicationError(f"{self.name} holds no parameters of bucket {frame.key}.")
        return part

    def _part(self, frame: Frame) -> SumServer | _Store:
        if frame.key not in self._parts:
            raise CommunicationError(f"{self.name} has no bucket {frame.key}.")
        return self._parts[frame.key]

    def _rest(self, frame: Frame, reply: ReplyTo) -> None:
        for _, part in self._all_parts():
            part.rest(frame.sender)
        reply(frame.answer())

    def _state(self, frame: Frame, reply: ReplyTo) -> None:
        fields = self._part(frame).state()
        reply(frame.answer(tuple(fields.values()), json.dumps(list(fields))))

    def _restore(self, frame: Frame, reply: ReplyTo) -> None:
        try:
            keys = json.loads(frame.note)
        except (ValueError, RecursionError) as exc:
            raise CommunicationError(f"the names of a saved state are not JSON: {one_line(exc)}.") from exc
        if not isinstance(keys, list) or not all(isinstance(key, str) and key.count("|") >= 2 for key in keys):
            raise CommunicationError("a saved state must name its fields as a list of parameter|field|dimensions.")
        part = self._parts.get(frame.key) or self._new_store(frame)
        part.restore(frame.tensors, keys)
        with self._lock:
            self._parts[frame.key] = part
        reply(frame.answer())

    def _new_store(self, frame: Frame) -> _Store:
        """The store of a bucket's parameters, made when they arrive."""
        about, strategy = self._about, self._strategy
        assert about is not None
        assert strategy is not None
        rule = strategy.synchronization
        if frame.key not in about.buckets or rule.barrier:
            raise CommunicationError(f"{self.name} has no bucket {frame.key}.")
        if not frame.tensors:
            raise CommunicationError(f"bucket {frame.key} comes without its parameters.")
        check_values(about.buckets[frame.key], frame.tensors[0])
        if self._first_pushes is not None:
            return FirstPushStore(frame.key, strategy.compression, self._first_pushes, frame.tensors[0])
        return ParameterStore(frame.key, about, strategy.compression, rule, frame.tensors[0])

    def _bye(self, frame: Frame, reply: ReplyTo) -> None:
        with self._lock:
            self._goodbyes.add(frame.sender)
        for _, part in self._all_parts():
            part.leave(frame.sender)
        if self._slots is not None:
            self._slots.leave(frame.sender)
        reply(frame.answer())

    def _tell_slots(self, frame: Frame, reply: ReplyTo) -> None:
        slots = self._slots
        found = {"slots": 0, "port": 0} if slots is None else {"slots": slots.num_slots, "port": slots.address[1]}
        reply(frame.answer(note=json.dumps({**found, "tag": self._tag})))

    def _missing(self, frame: Frame, reply: ReplyTo) -> None:
        quiet_s = time.monotonic() - self._heard_s
        reply(frame.answer(note=json.dumps({"ranks": self._awaited(), "quiet_s": quiet_s})))
