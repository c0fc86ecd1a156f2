"""An exchange through a server: a worker sends its payload and gets the sum of all.

For any architecture that has servers. For a compressor whose payload cannot be decoded alone, the server forms the sums
round by round instead.
"""

from __future__ import annotations

import torch

from laconic.architecture.contract import Codec
from laconic.core.exchange import Answer, Exchange, Move, Servers, Wire
from laconic.core.moment import Moment
from laconic.core.payload import Payload
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.sums_only import SumsOnly
from laconic.core.transport import DoneWork, Work


def sum_at_server(
    flat: torch.Tensor, state: BucketState, compression: Codec, wire: Wire, own: torch.Tensor | None = None
) -> Exchange:
    """Send this rank's payload, get the sum of all; in several rounds where the compressor needs them."""
    assert wire.servers is not None, "the architecture declares no servers"
    if not compression.traits.decodes_alone:
        yield from sum_rounds_at_server(flat, state, compression, wire, own)
        return
    payload = compression.encode(flat, state)
    if own is not None:
        compression.decode(payload, own, state)
    answer = wire.servers.reduce(wire.bucket, payload.tensors, decoded=True, moment=state.moment, what=wire.what)
    if wire.decoupled:
        yield DoneWork()  # the answer of the server is taken later
    yield answer
    compression.back().decode(Payload(answer.tensors), flat, state)


def sum_rounds_at_server(
    flat: torch.Tensor, state: BucketState, compression: Codec, wire: Wire, own: torch.Tensor | None = None
) -> Exchange:
    """Form every sum of the compressor on a server."""
    assert wire.servers is not None, "the architecture declares no servers"
    yield from compression.exchange(flat, state, _AtServer(wire.servers, wire, state.moment), own)


def bytes_to_server(bucket: Bucket, compression: Codec, moment: Moment) -> int:
    """Bytes that a worker sends: one payload, or those that each round sums."""
    if compression.traits.decodes_alone:
        return compression.payload_bytes(bucket, moment)
    return sum(size for round in compression.rounds(bucket, moment) for size in round.sizes)


def moves_to_server(bucket: Bucket, compression: Codec, moment: Moment) -> tuple[Move, ...]:
    """To the server and back, once or as often as the compressor has rounds."""
    if compression.traits.decodes_alone:
        sent = compression.payload_bytes(bucket, moment)
        back = compression.back().payload_bytes(bucket, moment)
        return (Move("serve", (sent,), answer_bytes=back),)
    rounds = compression.rounds(bucket, moment)
    return tuple(Move("serve", round.sizes, answer_bytes=sum(round.sizes)) for round in rounds)


def waits_for_server(bucket: Bucket, compression: Codec, moment: Moment) -> int:
    """One wait, or those of the compressor."""
    return 1 if compression.traits.decodes_alone else compression.num_waits(bucket, moment)


class _AtServer(SumsOnly):
    """A group whose sums a server forms."""

    def __init__(self, servers: Servers, wire: Wire, moment: Moment) -> None:
        super().__init__(moment)
        self._servers = servers
        self._wire = wire

    def sum(self, tensors: tuple[torch.Tensor, ...]) -> Work:
        wire = self._wire
        answer = self._servers.reduce(wire.bucket, tensors, decoded=False, moment=self._moment, what=wire.what)
        return _IntoPlace(answer, tensors)


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
