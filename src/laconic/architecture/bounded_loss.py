"""All ranks average with all ranks over datagrams, and a mean is formed of what has arrived in time."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.architecture.contract import Architecture, Codec, Scope
from laconic.architecture.datagrams.loss_bound import LossBound
from laconic.architecture.datagrams.rows import Rows
from laconic.architecture.datagrams.spread import gathered, spread
from laconic.core.exchange import Exchange, Move, PartialSum, Wire
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.sums_only import SumsOnly
from laconic.core.transport import AllWork, DoneWork, Work
from laconic.settings import choice, share


@dataclass(frozen=True, kw_only=True)
class BoundedLoss(Architecture):
    """Each rank owns 1/n of the values: it gets them from all ranks by UDP and sends back the mean of what arrived.

        mean of a row   n / |A| times the sum over the ranks A whose row has arrived in time
        sent by a rank  2 (n-1)/n N, as in a ring, in 2 steps

    Frames that are lost or late are left out of the first step only, at most `tolerate` of them on average; beyond that
    they are fetched. Means are sent until every rank has them all, so replicas stay identical.

    Reference: Warraich et al. 2025 (OptiReduce), NSDI.
    """

    name: ClassVar[str] = "bounded_loss"
    scope: ClassVar[Scope] = "everyone"
    rounds_by_bucket: ClassVar[bool] = True

    tolerate: float = share(0.05, at_most=0.5)
    """The share of frames that may be left out of means, on average over exchanges; frames beyond it are fetched."""
    percentile: float = share(0.95)
    """How long an owner waits for frames: 1.25 times this percentile of the times of recent exchanges of that size."""
    spread: str = choice("none", "hadamard")
    """hadamard: frames are mixed by a Hadamard transform, so that a lost frame changes many values a little; none: it
    changes its own values, which become the mean over the other ranks. With Adam, none leaves the model's loss as it
    is."""

    @property
    def loss_bound(self) -> LossBound:
        """The two settings."""
        return LossBound(tolerate=self.tolerate, percentile=self.percentile)

    def exchange(
        self, flat: torch.Tensor, state: BucketState, compression: Codec, wire: Wire, own: torch.Tensor | None = None
    ) -> Exchange:
        """One sum of what the compressor sends."""
        return compression.exchange(flat, state, _OverDatagrams(wire, state, mixed=self.spread != "none"), own)

    def sent_bytes(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """Bytes of the rows that others own, and of the means of this rank's rows to each of them."""
        return sum(rows.sent_bytes for rows in self._rows(bucket, compression, moment))

    def moves(self, bucket: Bucket, compression: Codec, moment: Moment, *, decoupled: bool = False) -> tuple[Move, ...]:
        """For each sum, a scatter of rows to their owners and a gather of the means."""
        found: list[Move] = []
        for rows in self._rows(bucket, compression, moment):
            found += [Move("scatter", (rows.nbytes,)), Move("gather", (rows.owned_bytes,))]
        return tuple(found)

    def num_waits(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """The waits of the compressor: both steps are one wait."""
        return compression.num_waits(bucket, moment)

    def _rows(self, bucket: Bucket, compression: Codec, moment: Moment) -> list[Rows]:
        """The rows in which each sum travels."""
        sizes = [size for round in compression.rounds(bucket, moment) for size in round.sizes if size]
        # What adds up has the same number of values as the bucket; a complex one is two real ones.
        numel = bucket.numel * (2 if bucket.dtype.is_complex else 1)
        return [Rows(numel, moment.world_size, size // numel) for size in sizes]


class _OverDatagrams(SumsOnly):
    """A group whose sums are formed of the frames that arrive."""

    def __init__(self, wire: Wire, state: BucketState, *, mixed: bool) -> None:
        super().__init__(state.moment)
        self._wire = wire
        self._state = state
        # The same on every rank, and another one for every exchange.
        self._seed = zlib.crc32(f"{state.moment.round} {wire.bucket}".encode()) if mixed else None

    def sum(self, tensors: tuple[torch.Tensor, ...]) -> Work:
        if self.size == 1:
            return DoneWork()
        works = [self._sum(tensor) for tensor in tensors if tensor.numel()]
        return works[0] if len(works) == 1 else AllWork(works)

    def _sum(self, tensor: torch.Tensor) -> Work:
        means = self._wire.partial_means
        assert means is not None, "the runtime opens datagrams where an architecture has a loss_bound"
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        rows = Rows(real.numel(), self.size, real.element_size())
        table = rows.cut(real.reshape(-1))
        if self._seed is not None:
            table = spread(table, self._seed)
        answer = means.reduce(rows.by_owner(table), what=self._wire.what)
        return _IntoPlace(answer, rows, real, self._seed, self._state)


class _IntoPlace:
    """Work that ends with the sum in the tensor that was sent."""

    def __init__(
        self, answer: PartialSum, rows: Rows, tensor: torch.Tensor, seed: int | None, state: BucketState
    ) -> None:
        self._answer = answer
        self._rows = rows
        self._tensor = tensor
        self._seed = seed
        self._state = state

    def wait(self) -> None:
        self._answer.wait()
        table = self._rows.in_order(self._answer.rows)
        if self._seed is not None:
            table = gathered(table, self._seed)
        self._tensor.copy_(table.view(-1)[: self._rows.numel].view(self._tensor.shape))
        self._state.metrics["lost_ratio"] = torch.tensor(self._answer.lost_ratio)

    def done(self) -> bool:
        return self._answer.done()
