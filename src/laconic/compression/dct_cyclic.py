"""Send the coefficients of a cosine transform that are largest on one rank, a different rank in every round."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch

from laconic.compression.contract import Compressor
from laconic.compression.families.packed import Packed
from laconic.compression.integer import Int4
from laconic.compression.traits import Traits, computed_once
from laconic.compression.wire.cosine import cosine_transform
from laconic.compression.wire.entries import num_kept_of_chunks
from laconic.compression.wire.subsets import LONGEST_CHUNK, SubsetsOfChunks
from laconic.core.exchange import Exchange, Group, Round
from laconic.core.moment import Moment
from laconic.core.optimizer_facts import OptimizerFacts
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.tensor import TensorSpec
from laconic.core.transport import Work
from laconic.settings import count, method, share


@dataclass(frozen=True, kw_only=True)
class DctCyclic(Compressor):
    """All ranks send the same k coefficients of each chunk, which one rank chooses, in turn.

        c_i = D x_i,   leader of the j-th chunk of a tensor = (j + round) mod n
        I = places of the k largest |c_leader| of a chunk,   k = ceil(density * chunk)
        decoded = D^T (C(sum_i C(c_i[I])) at I, zero elsewhere)

    D is the cosine transform of dct_topk, and C is the compressor of the values. As in CLT-k, ranks that send the same
    coefficients need not each send positions, and a coefficient arrives with the share of every rank. So bytes do not
    grow with the number of ranks, as long as tensors have more chunks than there are ranks. The error of a sum that is
    sent back stays with the rank that has formed the sum, as if it had sent less itself. A value that is not finite
    makes its whole chunk not finite, and with it all chunks whose values share a block of C.

    Reference: Chen et al. 2020 (ScaleCom), arXiv:2104.11125; Peng et al. 2024 (DeMo), arXiv:2411.19870.
    """

    name: ClassVar[str] = "dct_cyclic"
    family: ClassVar[str] = "sparsification"
    first_setting: ClassVar[str] = "density"
    good_for: ClassVar[str] = "demo on many workers: bytes do not grow with them"

    density: float = share(0.046875)
    """Share of the coefficients of each chunk that is sent; at least one of each. The default is 3 of 64."""
    chunk: int = count(64, at_least=1, at_most=LONGEST_CHUNK)
    """Adjacent entries that are transformed together."""
    values: Compressor = method(Int4(block=512), wants=Packed)
    """The compressor of the coefficients."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """Those of the values, of which only a share is sent; `loss_gap` was measured with default settings."""
        values = self.values.traits
        return replace(
            super().traits,
            density=self.density * values.density,
            wants_error_feedback=True,
            decodes_alone=False,
            payloads_add_up=False,
            keeps_scale=values.keeps_scale,
            scale_equivariant=values.scale_equivariant,
            amplifies=values.amplifies,
            at_random=values.at_random,
            exact_bytes=values.exact_bytes,
            loss_gap=0.169,
            loss_deviation=0.06,
        )

    def check(self, tensors: Sequence[TensorSpec], optimizer: OptimizerFacts) -> None:
        """Check the compressor of the values."""
        self.values.check(self._values_bucket(Bucket(tuple(tensors))).tensors, optimizer)

    def init(self, bucket: Bucket) -> BucketState:
        """The state of the compressor of the values."""
        state = super().init(bucket)
        state.parts.append(self.values.init(self._values_bucket(bucket)))
        return state

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """Each rank's choice for its chunks to all, then the exchange of values."""
        chosen = Round("gather", (self._subsets(bucket).packed_bytes(moment.world_size),))
        return (chosen, *self.values.rounds(self._values_bucket(bucket), moment))

    def num_waits(self, bucket: Bucket, moment: Moment) -> int:
        """One for the choice, and those of the values."""
        return 1 + self.values.num_waits(self._values_bucket(bucket), moment)

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """Agree on positions, then exchange the values there."""
        coefficients = cosine_transform(flat, state, self.chunk)
        places = yield from self._agree(coefficients, state, group)
        values = coefficients[places].to(torch.float32)
        part = state.part(-1)
        sent = None if own is None else torch.empty_like(values)
        part.owed = None if own is None else torch.zeros_like(values)
        yield from self.values.exchange(values, part, group, sent)
        flat.copy_(self._dense(values, places, coefficients, state))
        if own is not None and sent is not None and part.owed is not None:
            own.copy_(self._dense(sent.sub_(part.owed), places, coefficients, state))
        part.owed = None

    def _agree(
        self, coefficients: torch.Tensor, state: BucketState, group: Group
    ) -> Generator[Work, None, torch.Tensor]:
        """The positions that the leaders of this round have chosen, the same on every rank."""
        subsets, round = self._subsets(state.bucket), state.moment.round
        led = _led(subsets, (group.rank - round) % group.size, group.size, state)
        chosen = torch.zeros(subsets.share(group.size), dtype=torch.int64, device=coefficients.device)
        chosen[led.places] = subsets.largest(coefficients, led.chunks)
        work, parts = group.gather(subsets.pack(chosen, group.size))
        yield work
        # The part that rank 0 leads in round 0 comes first.
        numbers = subsets.unpack(parts).roll(-round, 0).view(-1)
        return subsets.indices(numbers[_places(subsets, group.size, state)])

    def _dense(
        self, values: torch.Tensor, places: torch.Tensor, like: torch.Tensor, state: BucketState
    ) -> torch.Tensor:
        """The gradient for these values and zeros elsewhere."""
        scattered = torch.zeros_like(like)
        scattered[places] = values.to(like.dtype)
        return cosine_transform(scattered, state, self.chunk, inverse=True)

    def _subsets(self, bucket: Bucket) -> SubsetsOfChunks:
        return SubsetsOfChunks(bucket, self.chunk, self.density)

    def _values_bucket(self, bucket: Bucket) -> Bucket:
        """The chosen values as a bucket of their own, in order."""
        return Bucket(
            tuple(
                TensorSpec(
                    tensor.name,
                    (num_kept_of_chunks(self.density, tensor.numel, self.chunk),),
                    torch.float32,
                    tensor.device,
                )
                for tensor in bucket.tensors
            )
        )


class _Led(NamedTuple):
    """The chunks that a rank chooses for."""

    chunks: list[torch.Tensor]
    places: torch.Tensor


def _led(subsets: SubsetsOfChunks, part: int, num_parts: int, state: BucketState) -> _Led:
    """One of the parts, made once."""
    key = ("led", part, num_parts)
    if key not in state.tables:
        places, share = subsets.places(num_parts), subsets.share(num_parts)
        chunks = (places // share == part).nonzero().view(-1) if share else places
        device = state.bucket.device
        state.tables[key] = _Led(
            [one.to(device) for one in subsets.by_kind(chunks)], (places[chunks] - part * share).to(device)
        )
    found: _Led = state.tables[key]
    return found


def _places(subsets: SubsetsOfChunks, num_parts: int, state: BucketState) -> torch.Tensor:
    """The place of each chunk in all parts, made once."""
    key = ("places", num_parts)
    if key not in state.tables:
        state.tables[key] = subsets.places(num_parts).to(state.bucket.device)
    found: torch.Tensor = state.tables[key]
    return found
