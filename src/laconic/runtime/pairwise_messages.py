"""The messages of two replicas that average: parameters, or corrections to public copies of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from laconic.core.moment import Moment
from laconic.core.payload import Payload
from laconic.core.stateful import BucketState, ParameterState
from laconic.errors import CommunicationError, one_line
from laconic.runtime.buckets import Buckets
from laconic.runtime.job import Job

PER_EDGE = ("choco.own", "choco.theirs")
"""Fields of saved state that belong to a pair, and are invalid when the number of replicas changes."""
_UNDECODABLE = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)


class PairwiseMessages(Protocol):
    """One replica's edges; the caller holds the lock on the shared parameters."""

    asks: tuple[int, ...]
    """Neighbours that this replica starts exchanges with."""
    answers: tuple[int, ...]
    """Neighbours that start exchanges with this replica."""

    def read(self, peer: int, tensors: Sequence[torch.Tensor], step: int) -> list[torch.Tensor]:
        """Decode a neighbour's message of its `step`, bucket by bucket; changes nothing.

        Raises CommunicationError for an invalid message.
        """
        ...

    def say(self, peer: int, step: int) -> list[torch.Tensor]:
        """The message for a neighbour in `step`."""
        ...

    def take(self, peer: int, said: Sequence[torch.Tensor], meant: Sequence[torch.Tensor]) -> None:
        """Apply a neighbour's decoded message; `said` is this replica's message to it."""
        ...

    def state(self) -> ParameterState:
        """The state kept about neighbours."""
        ...

    def load(self, saved: ParameterState) -> None:
        """Restore the state."""
        ...


def make_pairwise_messages(job: Job, shared: Buckets) -> PairwiseMessages:
    """The edges of this rank under the job's architecture."""
    moment = Moment(0, job.transport.rank, job.transport.world_size)
    architecture = job.strategy.architecture
    around = architecture.neighbours(moment)
    rate = architecture.copy_rate(job.strategy.compression.traits)
    if rate is not None:
        return PublicCopies(job, shared, rate, around.sends)
    return WholeParameters(shared, around.sends, around.receives)


class WholeParameters:
    """Parameters as they are."""

    def __init__(self, shared: Buckets, asks: tuple[int, ...], answers: tuple[int, ...]) -> None:
        self.asks = asks
        self.answers = answers
        self._flats = shared.flats

    def read(self, peer: int, tensors: Sequence[torch.Tensor], step: int) -> list[torch.Tensor]:
        if [(tensor.shape, tensor.dtype) for tensor in tensors] != [(flat.shape, flat.dtype) for flat in self._flats]:
            raise CommunicationError(f"rank {peer} sent parameters of another model.")
        return list(tensors)

    def say(self, peer: int, step: int) -> list[torch.Tensor]:
        return [flat.detach().to("cpu", copy=True) for flat in self._flats]

    def take(self, peer: int, said: Sequence[torch.Tensor], meant: Sequence[torch.Tensor]) -> None:
        for flat, mine, theirs in zip(self._flats, said, meant, strict=True):
            flat.add_((theirs - mine).to(flat.device), alpha=0.5)

    def state(self) -> ParameterState:
        """No state: messages carry all of it."""
        return {}

    def load(self, saved: ParameterState) -> None:
        """Nothing to restore."""


class PublicCopies:
    """Corrections to public copies that both ends of an edge keep: CHOCO, one edge at a time.

        q_i = C(z_i - p_i),   p_i <- p_i + q_i,   the same for j,   z_i <- z_i + gamma (p_j - p_i) / 2

    In each pair the lower rank starts the exchange, so that the exchanges of a pair stay in order.
    """

    def __init__(self, job: Job, shared: Buckets, rate: float, neighbours: tuple[int, ...]) -> None:
        rank = job.transport.rank
        self.asks = tuple(peer for peer in neighbours if peer > rank)
        self.answers = tuple(peer for peer in neighbours if peer < rank)
        self._job = job
        self._gamma = rate
        self._compression = job.strategy.compression
        self._shared = shared
        self._own = {peer: [flat.clone() for flat in shared.flats] for peer in neighbours}
        self._theirs = {peer: [flat.clone() for flat in shared.flats] for peer in neighbours}
        self._states: dict[int, list[BucketState]] = {
            peer: [self._compression.init(bucket) for bucket in shared.plan.buckets] for peer in neighbours
        }

    def _moment(self, step: int) -> Moment:
        return Moment(step, self._job.transport.rank, self._job.transport.world_size, step)

    def read(self, peer: int, tensors: Sequence[torch.Tensor], step: int) -> list[torch.Tensor]:
        corrections: list[torch.Tensor] = []
        per_bucket, rest = divmod(len(tensors), len(self._shared.flats))
        # The neighbour's step, not ours: both ends must draw the same random positions.
        moment = self._moment(step)
        for index, (flat, state) in enumerate(zip(self._shared.flats, self._states[peer], strict=True)):
            payload = tuple(part.to(flat.device) for part in tensors[index * per_bucket : (index + 1) * per_bucket])
            # Before decoding: compiled loops do not check sizes.
            size = sum(part.nbytes for part in payload)
            if rest or size != self._compression.payload_bytes(state.bucket, moment):
                raise CommunicationError(f"rank {peer} sent corrections of another model.")
            state.moment = moment
            corrections.append(torch.empty_like(flat))
            try:
                self._compression.decode(Payload(payload), corrections[-1], state)
            except _UNDECODABLE as exc:
                raise CommunicationError(f"what rank {peer} sent cannot be decoded: {one_line(exc)}.") from exc
        return corrections

    def say(self, peer: int, step: int) -> list[torch.Tensor]:
        sent: list[torch.Tensor] = []
        for flat, public, state in zip(self._shared.flats, self._own[peer], self._states[peer], strict=True):
            state.moment = self._moment(step)
            payload = self._compression.encode(flat - public, state)
            correction = torch.empty_like(flat)
            self._compression.decode(payload, correction, state)
            public += correction
            # Flat, as frames require; a copy, because the payload may be a view of memory that keeps changing.
            sent += [tensor.detach().reshape(-1).to("cpu", copy=True) for tensor in payload.tensors]
        return sent

    def take(self, peer: int, said: Sequence[torch.Tensor], meant: Sequence[torch.Tensor]) -> None:
        for index, (flat, correction) in enumerate(zip(self._shared.flats, meant, strict=True)):
            self._theirs[peer][index] += correction
            flat.add_(self._theirs[peer][index] - self._own[peer][index], alpha=self._gamma / 2)

    def _views(self) -> ParameterState:
        found: ParameterState = {}
        for kind, copies in zip(PER_EDGE, (self._own, self._theirs), strict=True):
            for peer, flats in copies.items():
                for index, flat in enumerate(flats):
                    for name, view in self._shared.views_of(index, flat).items():
                        found.setdefault(name, {})[f"{kind}|{peer}"] = view
        return found

    def state(self) -> ParameterState:
        return {name: {field: view.clone() for field, view in fields.items()} for name, fields in self._views().items()}

    def load(self, saved: ParameterState) -> None:
        for name, fields in self._views().items():
            for field, view in fields.items():
                if field in saved.get(name, {}):
                    view.copy_(saved[name][field])
