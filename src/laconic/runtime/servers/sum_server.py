"""A server that forms sums: it waits until the tensors of all ranks have arrived, then answers all at once."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from dataclasses import dataclass

import torch

from laconic.compression import Compressor
from laconic.core.frames import Frame
from laconic.core.listener import ReplyTo
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.errors import CommunicationError, one_line
from laconic.runtime.servers.protocol import UNDECODABLE, decode_payload, flag, read_note, whole

_MOST_WAITING = 8
"""The most waiting requests of one rank; normally a rank sends one and waits for the answer."""


@dataclass(frozen=True)
class _Part:
    """One rank's contribution to a sum."""

    frame: Frame
    reply: ReplyTo
    step: int
    round: int
    decoded: bool
    """Whether payloads are decoded; otherwise tensors are summed directly."""
    came_s: float

    def about(self) -> str:
        sizes = ", ".join(
            f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}" for tensor in self.frame.tensors
        )
        what = "a payload" if self.decoded else "plain tensors"
        return f"rank {self.frame.sender} {what} of step {self.step}, round {self.round} ({sizes})"

    def fits(self, other: _Part) -> bool:
        mine, theirs = ([(tensor.shape, tensor.dtype) for tensor in part.frame.tensors] for part in (self, other))
        return mine == theirs and (self.step, self.round, self.decoded) == (other.step, other.round, other.decoded)


class SumServer:
    """The sums of one bucket."""

    def __init__(self, bucket: Bucket, compression: Compressor, *, world_size: int, server: int) -> None:
        self._bucket = bucket
        self._compression = compression
        self._back = compression.back()
        self._world_size = world_size
        self._server = server
        self._lock = threading.Lock()
        self._came: list[deque[_Part]] = [deque() for _ in range(world_size)]
        self._gone: set[int] = set()
        self._over: str | None = None
        self._read = compression.init(bucket)
        # A state of its own: with error feedback it holds the residual of this server's answers.
        self._write = self._back.init(bucket)

    def add(self, frame: Frame, reply: ReplyTo) -> None:
        """Take one rank's contribution; with the last one, answer all."""
        note = read_note(frame.note)
        place = (whole(note, "step"), whole(note, "round"), flag(note, "decoded"))
        part = _Part(frame, reply, *place, came_s=time.monotonic())
        with self._lock:
            if self._over is not None:
                raise CommunicationError(self._over)
            if len(self._came[frame.sender]) >= _MOST_WAITING:
                raise CommunicationError(
                    f"rank {frame.sender} has asked for {_MOST_WAITING} sums of one bucket without waiting for any."
                )
            never = next((rank for rank in sorted(self._gone) if not self._came[rank]), None)
            if never is not None:
                raise CommunicationError(_gone(never))
            self._came[frame.sender].append(part)
            if not all(self._came):
                return
            parts = [queue.popleft() for queue in self._came]
            try:
                tensors = self._sum(parts)
            except (CommunicationError, *UNDECODABLE) as exc:
                answers = [part.frame.error(one_line(exc).rstrip(".")) for part in parts]
            else:
                answers = [part.frame.answer(tensors) for part in parts]
        for part, answer in zip(parts, answers, strict=True):
            part.reply(answer)

    def waiting_for(self) -> tuple[float, list[int]]:
        """The longest wait in seconds, and the ranks waited for; (0, []) if no rank waits."""
        with self._lock:
            came_s = [queue[0].came_s for queue in self._came if queue]
            missing = [rank for rank, queue in enumerate(self._came) if not queue]
        return (time.monotonic() - min(came_s), missing) if came_s else (0.0, [])

    def leave(self, sender: int) -> None:
        """This rank has detached: it takes part only in sums that it has contributed to."""
        with self._lock:
            self._gone.add(sender)
            late = not self._came[sender] and any(self._came)
        if late:
            self.fail(_gone(sender))

    def rest(self, sender: int) -> None:
        """Do nothing: a sum waits for all ranks alike."""

    def fail(self, reason: str) -> None:
        """Answer all waiting and all later requests with an error."""
        with self._lock:
            self._over = reason
            waiting = [part for queue in self._came for part in queue]
            for queue in self._came:
                queue.clear()
        for part in waiting:
            part.reply(part.frame.error(reason))

    def state(self) -> dict[str, torch.Tensor]:
        """The residual of the answers, keyed "parameter|field|number of dimensions"."""
        with self._lock:
            return {
                f"{name}|{field}|1": value.detach().clone().view(-1)
                for name, kept in self._write.by_parameter().items()
                for field, value in kept.items()
            }

    def restore(self, tensors: tuple[torch.Tensor, ...], keys: list[str]) -> None:
        """Restore a saved residual; raises CommunicationError, with nothing changed, if it does not fit."""
        if len(tensors) != len(keys):
            raise CommunicationError(f"a saved state has {len(keys)} fields and {len(tensors)} tensors.")
        with self._lock:
            owed = {
                f"{name}|{field}|1": value
                for name, fields in self._write.by_parameter().items()
                for field, value in fields.items()
            }
            saved = dict(zip(keys, tensors, strict=True))
            for key in owed.keys() ^ saved.keys():
                problem = "lacks" if key in owed else "has, but this server does not,"
                raise CommunicationError(f'a saved state {problem} "{one_line(key, 80)}".')
            for key, value in saved.items():
                if value.numel() != owed[key].numel() or value.dtype != owed[key].dtype:
                    raise CommunicationError(
                        f'a saved state has {value.numel()} {value.dtype} values of "{one_line(key, 80)}" instead of '
                        f"{owed[key].numel()} of {owed[key].dtype}."
                    )
                if not bool(torch.isfinite(value).all()):
                    raise CommunicationError(f'a saved state has NaN or infinite values in "{one_line(key, 80)}".')
            for key, value in saved.items():
                owed[key].copy_(value.view(owed[key].shape))

    def _sum(self, parts: list[_Part]) -> tuple[torch.Tensor, ...]:
        first = parts[0]
        for part in parts[1:]:
            if not part.fits(first):
                raise CommunicationError(
                    f"ranks sent different things for bucket {first.frame.key}: {first.about()}, {part.about()}."
                )
        if first.decoded:
            return self._merge(parts)
        totals = tuple(tensor.clone() for tensor in first.frame.tensors)
        for part in parts[1:]:
            for total, tensor in zip(totals, part.frame.tensors, strict=True):
                total += tensor
        return totals

    def _merge(self, parts: list[_Part]) -> tuple[torch.Tensor, ...]:
        moment = Moment(parts[0].step, 0, self._world_size, parts[0].round)
        total, one = (torch.empty(self._bucket.numel, dtype=self._bucket.dtype) for _ in range(2))
        for rank, part in enumerate(parts):
            self._read.moment = dataclasses.replace(moment, rank=rank)
            decode_payload(part.frame.tensors, one if rank else total, self._compression, self._read)
            if rank:
                total += one
        # Random numbers that differ from any worker's: values rounded up once must not be rounded up again.
        self._write.moment = dataclasses.replace(moment, rank=self._world_size + self._server)
        return self._back.encode(total, self._write).tensors


def _gone(rank: int) -> str:
    return f"rank {rank} has detached and takes part in no more sums"
