"""One server: it is told about the job, then serves every rank until the last has said goodbye."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable

import torch

from laconic.core.frames import Frame
from laconic.core.listener import ReplyTo
from laconic.errors import CommunicationError
from laconic.runtime.servers.aggregator import Aggregator
from laconic.runtime.servers.protocol import BYE, CONFIGURE, PULL, PUSH, REDUCE, RESTORE, STATE, Configuration
from laconic.runtime.servers.shelf import Shelf
from laconic.strategy import Strategy
from laconic.synchronization import Asynchronous

_LOG = logging.getLogger("laconic")


class Service:
    """Handles the frames of one server; see core/listener.py."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._about: Configuration | None = None
        self._aggregators: dict[int, Aggregator] = {}
        self._shelves: dict[int, Shelf] = {}
        self._left: set[int] = set()
        self._lost: str | None = None
        self.finished = threading.Event()
        """Set when every rank has said goodbye, or one was lost and nothing more can be done."""
        self._serve: dict[int, Callable[[Frame, ReplyTo], None]] = {
            CONFIGURE: self._configure,
            REDUCE: lambda frame, reply: self._aggregator(frame).add(frame, reply),
            PUSH: lambda frame, reply: self._shelf(frame).push(frame, reply),
            PULL: lambda frame, reply: reply(frame.answer((self._shelf(frame).pull(frame.sender),))),
            STATE: self._state,
            RESTORE: self._restore,
            BYE: self._bye,
        }

    def frame(self, frame: Frame, reply: ReplyTo) -> None:
        """See Handler."""
        serve = self._serve.get(frame.kind)
        if serve is None:
            raise CommunicationError(f"{self._name} knows no request of kind {frame.kind}.")
        if frame.kind != CONFIGURE:
            if self._about is None:
                raise CommunicationError(f"{self._name} has not been told about the job yet.")
            if not 0 <= frame.sender < self._about.world_size:
                raise CommunicationError(
                    f"{self._name} serves {self._about.world_size} ranks, not rank {frame.sender}."
                )
        if self._lost is not None and frame.kind != BYE:
            raise CommunicationError(self._lost)
        serve(frame, reply)

    def left(self, sender: int, reason: str) -> None:
        """See Handler; a rank that goes without a word takes the others with it."""
        with self._lock:
            if self._about is None or sender in self._left or self._lost is not None:
                return
            self._lost = f"rank {sender} {reason} before the end of training"
        _LOG.error("%s: %s", self._name, self._lost)
        for part in (*self._aggregators.values(), *self._shelves.values()):
            part.fail(self._lost)
        self.finished.set()

    def _configure(self, frame: Frame, reply: ReplyTo) -> None:
        about = Configuration.read(frame.note)
        strategy = Strategy.parse(about.strategy)
        rule, compression = strategy.synchronization, strategy.compression
        with self._lock:
            if self._about is not None:
                raise CommunicationError(f"{self._name} already serves a job.")
            if isinstance(rule, Asynchronous):
                for (number, bucket), values in zip(about.buckets.items(), frame.tensors, strict=True):
                    if values.numel() != bucket.numel or values.dtype != bucket.dtype:
                        raise CommunicationError(f"bucket {number} has {bucket.numel} values, got {values.numel()}.")
                    self._shelves[number] = Shelf(number, about, compression, rule, values)
            else:
                for number, bucket in about.buckets.items():
                    self._aggregators[number] = Aggregator(
                        bucket, compression, world_size=about.world_size, server=about.server
                    )
            self._about = about
        reply(frame.answer())

    def _aggregator(self, frame: Frame) -> Aggregator:
        if frame.key not in self._aggregators:
            raise CommunicationError(f"{self._name} forms no sums of bucket {frame.key}.")
        return self._aggregators[frame.key]

    def _shelf(self, frame: Frame) -> Shelf:
        if frame.key not in self._shelves:
            raise CommunicationError(f"{self._name} holds no parameters of bucket {frame.key}.")
        return self._shelves[frame.key]

    def _state(self, frame: Frame, reply: ReplyTo) -> None:
        if frame.key in self._aggregators:
            owed = self._aggregators[frame.key].owed.by_parameter()
            fields = {f"{name}|{field}|1": value for name, kept in owed.items() for field, value in kept.items()}
        else:
            fields = self._shelf(frame).state()
        reply(frame.answer([value.reshape(-1).clone() for value in fields.values()], json.dumps(list(fields))))

    def _restore(self, frame: Frame, reply: ReplyTo) -> None:
        try:
            keys = [str(key) for key in json.loads(frame.note)]
        except ValueError as exc:
            raise CommunicationError(f"{self._name} was sent a state it cannot read: {exc}.") from exc
        if frame.key in self._aggregators:
            saved: dict[str, dict[str, torch.Tensor]] = {}
            for key, value in zip(keys, frame.tensors, strict=True):
                name, field, _ = key.rsplit("|", 2)
                saved.setdefault(name, {})[field] = value
            self._aggregators[frame.key].owed.restore(saved)
        else:
            values, rest = frame.tensors[0], frame.tensors[1:]
            self._shelf(frame).restore(values, dict(zip(keys, rest, strict=True)))
        reply(frame.answer())

    def _bye(self, frame: Frame, reply: ReplyTo) -> None:
        assert self._about is not None
        with self._lock:
            self._left.add(frame.sender)
            last = len(self._left) == self._about.world_size
        for shelf in self._shelves.values():
            shelf.leave(frame.sender)
        reply(frame.answer())
        if last:
            self.finished.set()
