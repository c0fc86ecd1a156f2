"""What two replicas tell each other when they average: parameters, or corrections to public copies of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from laconic.architecture import Choco
from laconic.core.moment import Moment
from laconic.core.payload import Payload
from laconic.core.stateful import BucketState, ParameterState
from laconic.errors import CommunicationError
from laconic.runtime.buckets import Buckets
from laconic.runtime.job import Job


class Edges(Protocol):
    """One replica's edges; whoever calls holds the lock on the shared parameters."""

    asks: tuple[int, ...]
    """Neighbours this replica turns to."""
    answers: tuple[int, ...]
    """Neighbours that turn to this replica."""

    def ask(self, peer: int, step: int) -> list[torch.Tensor]:
        """What is sent to a neighbour in `step`."""
        ...

    def take(self, peer: int, sent: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], step: int) -> None:
        """Take in what a neighbour has sent in its `step`, having been sent, or being about to be, `sent`."""
        ...

    def state(self) -> ParameterState:
        """What is remembered about neighbours."""
        ...

    def load(self, saved: ParameterState) -> None:
        """Continue from that."""
        ...


def make_edges(job: Job, shared: Buckets) -> Edges:
    """The edges of this rank under the job's architecture."""
    moment = Moment(0, job.transport.rank, job.transport.world_size)
    architecture = job.strategy.architecture
    around = architecture.neighbours(moment)
    if isinstance(architecture, Choco):
        return PublicCopies(job, shared, architecture, around.sends)
    return PlainEdges(shared, around.sends, around.receives)


class PlainEdges:
    """Parameters as they are."""

    def __init__(self, shared: Buckets, asks: tuple[int, ...], answers: tuple[int, ...]) -> None:
        self.asks = asks
        self.answers = answers
        self._flats = shared.flats

    def ask(self, peer: int, step: int) -> list[torch.Tensor]:
        """See Edges."""
        return [flat.detach().cpu().clone() for flat in self._flats]

    def take(self, peer: int, sent: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], step: int) -> None:
        """See Edges."""
        if [tensor.shape for tensor in tensors] != [tensor.shape for tensor in sent]:
            raise CommunicationError(f"replica {peer} sent parameters of another model.")
        for flat, mine, theirs in zip(self._flats, sent, tensors, strict=True):
            flat.add_((theirs - mine).to(flat.device), alpha=0.5)

    def state(self) -> ParameterState:
        """See Edges; nothing."""
        return {}

    def load(self, saved: ParameterState) -> None:
        """See Edges."""


class PublicCopies:
    """Corrections to public copies that both ends of an edge keep: CHOCO, one edge at a time.

        q_i = C(z_i - p_i),   p_i <- p_i + q_i,   the same for j,   z_i <- z_i + gamma (p_j - p_i) / 2

    Of each pair the lower rank asks, so that no two exchanges of a pair overtake each other.
    """

    def __init__(self, job: Job, shared: Buckets, architecture: Choco, neighbours: tuple[int, ...]) -> None:
        rank = job.transport.rank
        self.asks = tuple(peer for peer in neighbours if peer > rank)
        self.answers = tuple(peer for peer in neighbours if peer < rank)
        self._job = job
        self._gamma = architecture.gamma
        self._compression = job.strategy.compression
        self._shared = shared
        self._own = {peer: [flat.clone() for flat in shared.flats] for peer in neighbours}
        self._theirs = {peer: [flat.clone() for flat in shared.flats] for peer in neighbours}
        self._states: dict[int, list[BucketState]] = {
            peer: [self._compression.init(bucket) for bucket in shared.plan.buckets] for peer in neighbours
        }

    def ask(self, peer: int, step: int) -> list[torch.Tensor]:
        """See Edges."""
        sent: list[torch.Tensor] = []
        moment = Moment(step, self._job.transport.rank, self._job.transport.world_size)
        for flat, public, state in zip(self._shared.flats, self._own[peer], self._states[peer], strict=True):
            state.moment = moment
            payload = self._compression.encode(flat - public, state)
            correction = torch.empty_like(flat)
            self._compression.decode(payload, correction, state)
            public += correction
            sent += [tensor.cpu() for tensor in payload.tensors]
        return sent

    def take(self, peer: int, sent: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], step: int) -> None:
        """See Edges."""
        if len(tensors) != len(sent):
            raise CommunicationError(f"replica {peer} sent corrections of another model.")
        per_bucket = len(tensors) // len(self._shared.flats)
        # Its step, not ours: both ends must draw the same random places, whatever step each is in.
        moment = Moment(step, self._job.transport.rank, self._job.transport.world_size)
        for index, flat in enumerate(self._shared.flats):
            payload = tensors[index * per_bucket : (index + 1) * per_bucket]
            state = self._states[peer][index]
            state.moment = moment
            correction = torch.empty_like(flat)
            self._compression.decode(Payload(tuple(part.to(flat.device) for part in payload)), correction, state)
            self._theirs[peer][index] += correction
            flat.add_(self._theirs[peer][index] - self._own[peer][index], alpha=self._gamma / 2)

    def state(self) -> ParameterState:
        """See Edges."""
        found: ParameterState = {}
        for kind, copies in (("own", self._own), ("theirs", self._theirs)):
            for peer, flats in copies.items():
                for index, flat in enumerate(flats):
                    for name, view in self._shared.views_of(index, flat).items():
                        found.setdefault(name, {})[f"choco.{kind}.{peer}"] = view
        return found

    def load(self, saved: ParameterState) -> None:
        """See Edges."""
        for name, fields in self.state().items():
            for field, view in fields.items():
                if field in saved.get(name, {}):
                    view.copy_(saved[name][field])
