"""A server that forms sums: it waits until the tensors of all ranks are there, then answers everybody at once."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque

import torch

from laconic.compression import Compressor
from laconic.core.frames import Frame
from laconic.core.listener import ReplyTo
from laconic.core.moment import Moment
from laconic.core.payload import Payload
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.errors import CommunicationError
from laconic.runtime.servers.protocol import read_note


class Aggregator:
    """The sums of one bucket."""

    def __init__(self, bucket: Bucket, compression: Compressor, *, world_size: int, server: int) -> None:
        self._bucket = bucket
        self._compression = compression
        self._back = compression.back()
        self._world_size = world_size
        self._server = server
        self._lock = threading.Lock()
        self._came: list[deque[tuple[Frame, ReplyTo]]] = [deque() for _ in range(world_size)]
        self._read = compression.init(bucket)
        # A state of its own: with error feedback it holds what this server still owes to all workers.
        self._write = self._back.init(bucket)

    @property
    def owed(self) -> BucketState:
        """What is remembered about sums that were sent back."""
        return self._write

    def add(self, frame: Frame, reply: ReplyTo) -> None:
        """Take one rank's part; with the last one, answer all."""
        with self._lock:
            self._came[frame.sender].append((frame, reply))
            if not all(self._came):
                return
            parts = [queue.popleft() for queue in self._came]
            try:
                tensors = self._sum([frame for frame, _ in parts])
            except CommunicationError as exc:
                for asked, answer in parts:
                    answer(asked.error(str(exc)))
                return
        for asked, answer in parts:
            answer(asked.answer(tensors))

    def waiting_for(self) -> list[int]:
        """Ranks that others wait for."""
        with self._lock:
            return [rank for rank, queue in enumerate(self._came) if not queue] if any(self._came) else []

    def fail(self, reason: str) -> None:
        """Answer everybody who waits that it is in vain."""
        with self._lock:
            waiting = [entry for queue in self._came for entry in queue]
            for queue in self._came:
                queue.clear()
        for frame, reply in waiting:
            reply(frame.error(reason))

    def _sum(self, frames: list[Frame]) -> tuple[torch.Tensor, ...]:
        first = frames[0]
        note = read_note(first.note)
        for frame in frames[1:]:
            if frame.note != first.note or [t.shape for t in frame.tensors] != [t.shape for t in first.tensors]:
                raise CommunicationError(
                    f"ranks sent different things for bucket {first.key}: rank {first.sender} {_about(first)}, rank "
                    f"{frame.sender} {_about(frame)}."
                )
        if not note["decoded"]:
            totals = tuple(tensor.clone() for tensor in first.tensors)
            for frame in frames[1:]:
                for total, tensor in zip(totals, frame.tensors, strict=True):
                    total += tensor
            return totals
        moment = Moment(int(note["step"]), 0, self._world_size, int(note["round"]))
        return self._merge([Payload(frame.tensors) for frame in frames], moment)

    def _merge(self, payloads: list[Payload], moment: Moment) -> tuple[torch.Tensor, ...]:
        self._read.moment = moment
        # Other random numbers than any worker's: what was rounded up once must not be rounded up again.
        self._write.moment = dataclasses.replace(moment, rank=moment.world_size + self._server)
        total, one = (torch.empty(self._bucket.numel, dtype=self._bucket.dtype) for _ in range(2))
        try:
            self._compression.decode(payloads[0], total, self._read)
            for payload in payloads[1:]:
                self._compression.decode(payload, one, self._read)
                total += one
        except (RuntimeError, ValueError, IndexError) as exc:
            raise CommunicationError(f"a payload cannot be decoded: {exc}.") from exc
        return self._back.encode(total, self._write).tensors


def _about(frame: Frame) -> str:
    sizes = ", ".join(f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}" for tensor in frame.tensors)
    return f"{frame.note} with {sizes}"
