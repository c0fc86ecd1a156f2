"""Workers send to servers and get back from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch

from laconic.architecture.contract import Architecture, Codec, Scope
from laconic.core.exchange import Answer, Exchange, Move, Servers, Wire
from laconic.core.moment import Moment
from laconic.core.payload import Payload
from laconic.core.plan import Bucket, Plan
from laconic.core.stateful import BucketState
from laconic.core.tensor import TensorSpec
from laconic.core.transport import DoneWork, Work
from laconic.errors import InvalidSetting
from laconic.settings import count, hosts

_SMALLEST_BYTES = 65536
"""Buckets are not cut into pieces below this size: each piece is a message."""


@dataclass(frozen=True, kw_only=True)
class ParameterServer(Architecture):
    """Servers beside the workers, each with a part of the model, form the mean or hold the parameters themselves.

        bsp, local   a server decodes what all workers have sent, adds that up and sends the sum back, encoded again
        ssp, asp     a server applies each worker's gradient with the optimizer and sends the parameters back

    A worker sends and receives N bytes, a server n N / m each way. With error_feedback both directions have a residual
    of their own. Servers are child processes of the workers, or run where `laconic serve` was called.

    Reference: Li et al. 2014 (parameter server), OSDI; Tang et al. 2019 (two-sided error feedback), arXiv:1905.05957.
    """

    name: ClassVar[str] = "parameter_server"
    scope: ClassVar[Scope] = "everyone"
    has_servers: ClassVar[bool] = True
    asynchronous: ClassVar[bool] = True
    keeps_clocks: ClassVar[bool] = True

    shards: int = count(0, at_most=4096)
    """Number of servers, each with about as many bytes; 0: one beside every worker."""
    hosts: str = hosts("")
    """Where servers already run, as address:port separated by |; empty: they are started beside the workers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hosts and self.shards:
            raise InvalidSetting(
                f"{self.axis}.{self.name}: shards={self.shards} has no effect beside hosts, of which each is a server. "
                "Give one of them."
            )

    def num_servers(self, world_size: int) -> int:
        """How many servers there are."""
        if self.hosts:
            return len(self.hosts.split("|"))
        return self.shards or world_size

    def cut(self, plan: Plan, world_size: int, *, tensors: bool) -> Plan:
        """Buckets in as many pieces as there are servers, of about the same number of bytes."""
        num_servers = self.num_servers(world_size)
        cut = tuple(piece for bucket in plan.buckets for piece in _pieces(bucket, num_servers, tensors=tensors))
        return replace(plan, buckets=cut)

    def owners(self, buckets: list[Bucket], world_size: int) -> list[int]:
        """The server of each bucket: in order, the one that has least."""
        loads = [0] * self.num_servers(world_size)
        found: list[int] = []
        for bucket in buckets:
            found.append(loads.index(min(loads)))
            loads[found[-1]] += bucket.nbytes
        return found

    def exchange(
        self, flat: torch.Tensor, state: BucketState, compression: Codec, wire: Wire, own: torch.Tensor | None = None
    ) -> Exchange:
        """Send this rank's payload, get the sum of all; in several rounds where the compressor needs them."""
        assert wire.servers is not None
        if not compression.traits.decodes_alone:
            group = _AtServer(wire.servers, wire, state.moment)
            yield from compression.exchange(flat, state, group, own)
            return
        payload = compression.encode(flat, state)
        if own is not None:
            compression.decode(payload, own, state)
        answer = wire.servers.reduce(wire.bucket, payload.tensors, decoded=True, moment=state.moment, what=wire.what)
        if wire.halves:
            yield DoneWork()  # what the server answers is taken later
        yield answer
        compression.back().decode(Payload(answer.tensors), flat, state)

    def sent_bytes(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """One payload, or what each round sums."""
        if compression.traits.decodes_alone:
            return compression.payload_bytes(bucket, moment)
        return sum(size for round in compression.rounds(bucket, moment) for size in round.sizes)

    def moves(self, bucket: Bucket, compression: Codec, moment: Moment, *, halves: bool = False) -> tuple[Move, ...]:
        """To the server and back, once or as often as the compressor has rounds."""
        if compression.traits.decodes_alone:
            sent = compression.payload_bytes(bucket, moment)
            back = compression.back().payload_bytes(bucket, moment)
            return (Move("serve", (sent,), answer_bytes=back),)
        rounds = compression.rounds(bucket, moment)
        return tuple(Move("serve", round.sizes, answer_bytes=sum(round.sizes)) for round in rounds)

    def num_waits(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """One, or as often as the compressor."""
        return 1 if compression.traits.decodes_alone else compression.num_waits(bucket, moment)


class _AtServer:
    """A group whose sums a server forms; it knows nothing else."""

    def __init__(self, servers: Servers, wire: Wire, moment: Moment) -> None:
        self._servers = servers
        self._wire = wire
        self._moment = moment

    @property
    def size(self) -> int:
        return self._moment.world_size

    @property
    def rank(self) -> int:
        return self._moment.rank

    def sum(self, tensors: tuple[torch.Tensor, ...]) -> Work:
        wire = self._wire
        answer = self._servers.reduce(wire.bucket, tensors, decoded=False, moment=self._moment, what=wire.what)
        return _IntoPlace(answer, tensors)

    def summed(self, tensors: tuple[torch.Tensor, ...]) -> Exchange:
        yield self.sum(tensors)

    def gather(self, tensor: torch.Tensor) -> tuple[Work, torch.Tensor]:
        raise AssertionError("refused by the rules of legality")

    def scatter(self, rows: torch.Tensor) -> tuple[Work, torch.Tensor]:
        raise AssertionError("refused by the rules of legality")

    def swap(self, send: torch.Tensor | None, receive: torch.Tensor | None, peer: int) -> Work:
        raise AssertionError("refused by the rules of legality")


class _IntoPlace:
    """Work that ends with the answer in the tensors that were sent."""

    def __init__(self, answer: Answer, tensors: tuple[torch.Tensor, ...]) -> None:
        self._answer = answer
        self._tensors = tensors

    def wait(self) -> None:
        self._answer.wait()
        for tensor, total in zip(self._tensors, self._answer.tensors, strict=True):
            tensor.copy_(total.view(tensor.shape))

    def done(self) -> bool:
        return self._answer.done()


def _pieces(bucket: Bucket, num_servers: int, *, tensors: bool) -> list[Bucket]:
    total_bytes = bucket.nbytes
    num_pieces = max(1, min(num_servers, total_bytes // _SMALLEST_BYTES))
    groups: dict[int, list[TensorSpec]] = {}
    begin = 0
    for tensor in bucket.tensors:
        ends = [total_bytes * piece // num_pieces - begin for piece in range(1, num_pieces)] if tensors else []
        # What would leave a small rest on either side is not worth a message of its own.
        inside = [end for end in ends if _SMALLEST_BYTES <= end <= tensor.nbytes - _SMALLEST_BYTES]
        for first, last in pairwise([0, *(end // tensor.dtype.itemsize for end in inside), tensor.numel]):
            part = tensor.piece(first, last)
            middle = begin + part.nbytes / 2
            groups.setdefault(int(middle * num_pieces / max(1, total_bytes)), []).append(part)
            begin += part.nbytes
    return [Bucket(tuple(group)) for group in groups.values()]
