"""A server that holds parameters: it applies each worker's gradient as it comes and answers with parameters."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from laconic.compression import Compressor
from laconic.core.frames import Frame
from laconic.core.listener import ReplyTo
from laconic.core.moment import Moment
from laconic.core.payload import Payload
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.errors import CommunicationError, one_line
from laconic.runtime.servers.protocol import OPTIMIZERS, Configuration, GroupSettings, group_settings, read_note
from laconic.synchronization import Asynchronous


@dataclass
class _Worker:
    """What the shelf knows about one worker."""

    known: torch.Tensor | None
    """The parameters it has, where that is needed."""
    answers: BucketState
    """The state of what is sent to it."""
    clock: int = 0
    """Steps it has pushed."""
    version: int = 0
    """Updates applied when it last got parameters."""
    gone: bool = False


class Shelf:
    """The parameters of one bucket and their optimizer."""

    def __init__(
        self, number: int, about: Configuration, compression: Compressor, rule: Asynchronous, values: torch.Tensor
    ) -> None:
        self._number = number
        self._bucket: Bucket = about.buckets[number]
        self._compression = compression
        self._rule = rule
        self._world_size = about.world_size
        self._server = about.server
        self._lock = threading.Lock()
        self._values = values.clone()
        self._parameters = {
            tensor.name: nn.Parameter(self._values[place].view(tensor.shape))
            for tensor, place in self._bucket.segments()
        }
        self._optimizer, self._places = self._make_optimizer(about)
        self._read = compression.init(self._bucket)
        # The difference to what a worker has is what it is still owed; no other residual is needed.
        back = compression.back().forgetful()
        self._back = None if back.lossless or not all(layer.keeps_scale for layer in back.layers()) else back
        remember = self._back is not None or rule.compensation > 0
        self._workers = [
            _Worker(self._values.clone() if remember else None, (self._back or compression).init(self._bucket))
            for _ in range(about.world_size)
        ]
        self._version = 0
        self._waiting: list[tuple[Frame, ReplyTo, dict[str, int]]] = []

    def _make_optimizer(self, about: Configuration) -> tuple[torch.optim.Optimizer, dict[int, int]]:
        group_of = dict(about.group_of)
        members: dict[int, list[nn.Parameter]] = {}
        for name, parameter in self._parameters.items():
            members.setdefault(group_of[name], []).append(parameter)
        places = {group: place for place, group in enumerate(sorted(members))}
        groups = [{"params": members[group], **about.groups[group]} for group in sorted(members)]
        kind = OPTIMIZERS[about.optimizer]
        try:
            return kind(groups), places  # pyrefly: ignore[missing-argument] - every kind has its own
        except (TypeError, ValueError, KeyError) as exc:
            raise CommunicationError(f"a server cannot make a {about.optimizer}: {one_line(exc)}.") from exc

    def push(self, frame: Frame, reply: ReplyTo) -> None:
        """Apply a worker's gradient; the answer comes when the worker may go on."""
        note = read_note(frame.note)
        worker = self._workers[frame.sender]
        with self._lock:
            staleness = self._version - worker.version
            self._apply(Payload(frame.tensors), worker, note, staleness, frame.sender)
            self._version += 1
            worker.clock += 1
            worker.version = self._version
            self._waiting.append((frame, reply, {"staleness": staleness}))
            self._answer_ready()

    def _apply(
        self, payload: Payload, worker: _Worker, note: Mapping[str, object], staleness: int, sender: int
    ) -> None:
        gradient = torch.empty_like(self._values)
        self._read.moment = Moment(int(str(note["step"])), sender, self._world_size)
        try:
            self._compression.decode(payload, gradient, self._read)
        except (RuntimeError, ValueError, IndexError) as exc:
            raise CommunicationError(f"a gradient of rank {sender} cannot be decoded: {one_line(exc)}.") from exc
        if self._rule.compensation and worker.known is not None:
            gradient.addcmul_(gradient * gradient, self._values - worker.known, value=self._rule.compensation)
        groups, unused = note["groups"], note["unused"]
        assert isinstance(groups, list)
        assert isinstance(unused, list)
        rate = self._rule.rate(self._world_size, staleness)
        for group, place in self._places.items():
            settings: GroupSettings = group_settings(groups[group])
            self._optimizer.param_groups[place].update(settings)
            self._optimizer.param_groups[place]["lr"] = float(str(settings["lr"])) * rate
        for index, (tensor, place) in enumerate(self._bucket.segments()):
            used = index not in unused
            self._parameters[tensor.name].grad = gradient[place].view(tensor.shape) if used else None
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _answer_ready(self) -> None:
        """Answer everybody who is not too far ahead."""
        slowest = min((worker.clock for worker in self._workers if not worker.gone), default=0)
        still: list[tuple[Frame, ReplyTo, dict[str, int]]] = []
        for frame, reply, facts in self._waiting:
            ahead = self._workers[frame.sender].clock - slowest
            if self._rule.lead is not None and ahead > self._rule.lead:
                still.append((frame, reply, facts))
                continue
            self._workers[frame.sender].version = self._version
            reply(frame.answer(self._for(frame.sender), json.dumps({**facts, "lead": ahead})))
        self._waiting = still

    def _for(self, sender: int) -> tuple[torch.Tensor, ...]:
        """Parameters as they are sent to a worker: all, or how they differ from what it has."""
        worker = self._workers[sender]
        if self._back is None:
            if worker.known is not None:
                worker.known.copy_(self._values)
            return (self._values.clone(),)
        assert worker.known is not None
        moment = Moment(worker.clock, self._world_size + self._server, self._world_size)
        worker.answers.moment = dataclasses.replace(moment, rank=moment.rank + sender)
        payload = self._back.encode(self._values - worker.known, worker.answers)
        sent = torch.empty_like(self._values)
        self._back.decode(payload, sent, worker.answers)
        worker.known += sent
        return payload.tensors

    def pull(self, sender: int) -> torch.Tensor:
        """The parameters as they are."""
        with self._lock:
            worker = self._workers[sender]
            worker.version = self._version
            if worker.known is not None:
                worker.known.copy_(self._values)
            return self._values.clone()

    def state(self) -> dict[str, torch.Tensor]:
        """What the optimizer remembers, as "parameter|field|number of dimensions"."""
        with self._lock:
            return {
                f"{name}|{field}|{torch.as_tensor(value).dim()}": torch.as_tensor(value).detach().clone().view(-1)
                for name, parameter in self._parameters.items()
                for field, value in self._optimizer.state.get(parameter, {}).items()
                if isinstance(value, torch.Tensor | float | int)
            }

    def restore(self, values: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from other parameters and what the optimizer remembered then."""
        with self._lock:
            self._values.copy_(values)
            self._optimizer.state.clear()
            for key, value in state.items():
                name, field, dims = key.rsplit("|", 2)
                parameter = self._parameters[name]
                self._optimizer.state[parameter][field] = value.clone().view(() if dims == "0" else parameter.shape)
            for worker in self._workers:
                if worker.known is not None:
                    worker.known.copy_(self._values)

    def leave(self, sender: int) -> None:
        """Nobody has to wait for this worker any more."""
        with self._lock:
            self._workers[sender].gone = True
            self._answer_ready()

    def waiting_for(self) -> list[int]:
        """Ranks that others wait for: the slowest ones."""
        with self._lock:
            if not self._waiting:
                return []
            slowest = min(worker.clock for worker in self._workers if not worker.gone)
            return [rank for rank, worker in enumerate(self._workers) if worker.clock == slowest and not worker.gone]

    def fail(self, reason: str) -> None:
        """Answer everybody who waits that it is in vain."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for frame, reply, _ in waiting:
            reply(frame.error(reason))
