"""Send integers on a scale that all ranks already know, so that a plain all-reduce adds them up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.contract import Compressor, uncompressed, uncompressed_rounds
from laconic.compression.kernels import shared_grid
from laconic.compression.kernels.lanes import new_numbers, pack, unpack
from laconic.compression.kernels.shared_grid import Grid
from laconic.compression.traits import Traits, computed_once
from laconic.compression.wire.chunks import Chunks, chunks_of
from laconic.compression.wire.lanes import Lanes
from laconic.compression.wire.seeds import moment_seed
from laconic.core.exchange import Exchange, Group, Round
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState, Resize
from laconic.errors import MethodError
from laconic.settings import count, number

_NORM = "intsgd.norm"
_LEAST_NORM = 1e-8
"""Represents a norm of zero: a parameter whose gradients were all zero so far."""
_BLOCK = 4096
"""Values whose random numbers have one seed."""


@dataclass(frozen=True, kw_only=True)
class IntSgd(Compressor):
    """Round every value at random to a multiple of a unit that follows from earlier means, and add up whole numbers.

        unit = sqrt(2 n r / d) / n,   code_i = floor(g_i / unit + u),   |code_i| <= largest,   u uniform in [0, 1)
        decoded = unit * sum_i code_i,   r <- memory * r + (1 - memory) * |decoded|^2

    d is the number of values of the parameter, n that of workers; g_i is already divided by n. In the paper r is a
    moving average of the squared change of the parameters divided by the learning rate; under SGD this quotient is the
    mean gradient, which is used here. All ranks see the same means, so all know the unit and none has to be sent. The
    first round sends uncompressed values, because there is no earlier mean. Sums of codes are exact in any order, so a
    network switch could form them too.

    Codes have as many bits as n * (2 largest + 1) values need. A code beyond `largest` is clipped, which biases the
    result where a value is far above the usual; the unit then grows for the next round. A parameter with a NaN or an
    infinity arrives as NaN as a whole, and does not enter r.

    Reference: Mishchenko et al. 2021, arXiv:2102.08374.
    """

    name: ClassVar[str] = "intsgd"
    family: ClassVar[str] = "quantization"
    good_for: ClassVar[str] = "one plain all-reduce of small integers; many workers, switches that add"
    on_resize: ClassVar[Mapping[str, Resize]] = {_NORM: "copy"}
    scaled_fields: ClassVar[frozenset[str]] = frozenset({_NORM})

    largest: int = count(31, at_least=1, at_most=1 << 20)
    """The largest magnitude of one rank's code; with 31, four ranks need 8 bits a value."""
    memory: float = number(0.9, at_least=0.0, at_most=0.999)
    """The share of the squared norm of earlier means that is kept."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """Every round is a sum; the unit depends on earlier means. Unbiased except for clipping."""
        return replace(
            super().traits,
            decodes_alone=False,
            sums_only=True,
            payloads_add_up=False,
            needs_whole_tensors=True,
            loss_gap=-0.032,
            loss_deviation=0.047,
        )

    def init(self, bucket: Bucket) -> BucketState:
        """A norm of zero for each parameter that has values."""
        norms = {
            tensor.name: torch.zeros((), dtype=torch.float64, device=bucket.device)
            for tensor in bucket.tensors
            if tensor.numel
        }
        return BucketState(bucket, whole={_NORM: norms} if norms else {})

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """One sum: of values in the first round, of codes in all others."""
        if moment.round == 0:
            return uncompressed_rounds(bucket)
        return (Round("sum", (self._lanes(bucket, moment.world_size).nbytes,)),)

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """Add up codes, and compute the next unit from the mean."""
        names = _names(state.bucket)
        if state.moment.round == 0 or not names:
            yield from uncompressed(flat, group, own)
            seen = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in _pieces(state.bucket, flat)]
            if seen:
                self._learn(torch.stack(seen), state)
        else:
            units, lanes = self._units(state, group.size), self._lanes(state.bucket, group.size)
            grid, chunks, numel = self._grid(units, state), _chunks(state), flat.numel()
            numbers = new_numbers(lanes, grid.dtype, flat.device)
            finite = shared_grid.encode(flat, chunks, grid, moment_seed(state.moment), numbers[:numel])
            broken = numbers[numel : lanes.num_values]
            broken.copy_(_of_parameters((~finite).long(), state) > 0)
            if own is not None:
                known = torch.where(broken > 0, torch.nan, units)
                shared_grid.decode(numbers[:numel], 1, chunks, self._grid(known, state), own)
            words = pack(lanes, numbers)
            yield group.sum((words,))
            sums = unpack(lanes, words)
            known = torch.where(sums[numel:] > 0, torch.nan, units)
            squares = shared_grid.decode(sums[:numel], group.size, chunks, self._grid(known, state), flat)
            # The halves of 64 bits are added up one by one: both sums are exact, however large a parameter is.
            high, low = (_of_parameters(half, state).double() for half in (squares >> 32, squares & 0xFFFFFFFF))
            self._learn(known * (2.0**32 * high + low).sqrt(), state)

    def _lanes(self, bucket: Bucket, world_size: int) -> Lanes:
        most = math.isqrt(2**63 // _BLOCK) // world_size
        if self.largest > most:
            raise MethodError(
                f"compression.intsgd.largest={self.largest} is too large for {world_size} ranks: squares of sums would "
                f"not fit into 64 bits. Give at most {most}."
            )
        # One more number for each parameter: whether it holds a value that is not finite.
        return Lanes(bucket.numel + len(_names(bucket)), 2 * self.largest, world_size)

    def _units(self, state: BucketState, world_size: int) -> torch.Tensor:
        """The unit of each parameter that has values."""
        norms = torch.stack([state.whole[_NORM][name] for name in _names(state.bucket)]).clamp(min=_LEAST_NORM)
        return (norms * (2 / world_size / _numels(state).double()).sqrt()).float()

    def _grid(self, units: torch.Tensor, state: BucketState) -> Grid:
        """The same unit for all chunks of a parameter."""
        of_chunks = units[_parameter_of_chunk(state)]
        return Grid(of_chunks, torch.zeros_like(of_chunks), -self.largest, 2 * self.largest)

    def _learn(self, seen: torch.Tensor, state: BucketState) -> None:
        """Move the norm of each parameter that has values towards the one seen now; one that is not finite is left."""
        norms = [state.whole[_NORM][name] for name in _names(state.bucket)]
        before = torch.stack(norms)
        moved = (self.memory * before.square() + (1 - self.memory) * seen.square()).sqrt()
        after = torch.where(before == 0, seen, moved)
        after = torch.where(after.isfinite(), after, before)
        torch._foreach_copy_(norms, list(after.unbind()))


def _names(bucket: Bucket) -> list[str]:
    """The parameters that have values, in order."""
    return [tensor.name for tensor in bucket.tensors if tensor.numel]


def _pieces(bucket: Bucket, flat: torch.Tensor) -> list[torch.Tensor]:
    """The values of each parameter that has any."""
    return [flat[place] for tensor, place in bucket.segments() if tensor.numel]


def _numels(state: BucketState) -> torch.Tensor:
    """The number of values of each parameter that has any."""
    key = "intsgd.numels"
    if key not in state.tables:
        sizes = [tensor.numel for tensor in state.bucket.tensors if tensor.numel]
        state.tables[key] = torch.tensor(sizes, device=state.bucket.device)
    numels: torch.Tensor = state.tables[key]
    return numels


def _chunks(state: BucketState) -> Chunks:
    return chunks_of(state, block=_BLOCK, bits=8, num_scales=0)


def _parameter_of_chunk(state: BucketState) -> torch.Tensor:
    """The number of each chunk's parameter, among those that have values."""
    key = "intsgd.parameters"
    if key not in state.tables:
        sizes = [-(-tensor.numel // _BLOCK) for tensor in state.bucket.tensors if tensor.numel]
        numbers = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        state.tables[key] = numbers.to(state.bucket.device)
    numbers: torch.Tensor = state.tables[key]
    return numbers


def _of_parameters(of_chunks: torch.Tensor, state: BucketState) -> torch.Tensor:
    """For each parameter that has values, the sum of the whole numbers of its chunks."""
    sums = torch.zeros(len(_names(state.bucket)), dtype=torch.int64, device=of_chunks.device)
    return sums.index_add_(0, _parameter_of_chunk(state), of_chunks)
