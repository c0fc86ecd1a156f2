"""PowerSGD: send two thin matrices whose product is the best low-rank picture of a gradient found so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import ClassVar

import torch

from laconic.compression.contract import Compressor
from laconic.compression.kernels.lowrank import orthonormal, product, times_left, times_right
from laconic.compression.traits import Traits
from laconic.compression.wire.seeds import base_seed, mix_tensor, uniform
from laconic.core.exchange import Exchange, Group, Round
from laconic.core.moment import Moment
from laconic.core.optimizer_facts import OptimizerFacts
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState, Resize
from laconic.core.tensor import TensorSpec
from laconic.errors import AttachError
from laconic.settings import count

_Q = "powersgd.q"


@dataclass(frozen=True, kw_only=True)
class PowerSgd(Compressor):
    """Send every matrix as the product of two thin ones, found by one step of power iteration per exchange.

        P = orth(sum_i M_i Q),   Q = sum_i M_i^T P,   decoded = P Q^T = P P^T sum_i M_i

    M is a parameter as a matrix: first dimension x all others. Q is kept for the next step, which thus continues the
    iteration (warm start); the first one is random, the same on all ranks. What is no matrix, or where rank (rows +
    columns) >= rows * columns, is sent as it is, in the same round as P. Rank i contributes P (M_i^T P)^T: P is common,
    so these contributions add up to what is decoded, and M_i less its contribution is what rank i has lost.

    All is computed and sent in float32, in float64 where gradients are float64; 16-bit gradients are widened. A value
    that is not finite makes its matrix not finite, for all to see, and is not remembered in Q.

    Reference: Vogels et al. 2019, arXiv:1905.13727.
    """

    name: ClassVar[str] = "powersgd"
    # Q comes out of a sum over all ranks. Only the space that it spans matters, so it need not follow a GradScaler.
    on_resize: ClassVar[Mapping[str, Resize]] = {_Q: "copy"}

    rank: int = count(4, at_least=1)
    """Columns of the two thin matrices: more of them keep more and send more."""

    def check(self, tensors: Sequence[TensorSpec], optimizer: OptimizerFacts) -> None:
        """Raise if the rank leaves nothing to compress."""
        if any(_is_low(tensor, self.rank) for tensor in tensors):
            return
        best, name = max(((_highest_rank(tensor), tensor.name) for tensor in tensors), default=(0, ""))
        if best:
            smaller, cure = "that rank", f'a rank of at most {best}, which compresses "{name}", or another compressor'
        else:
            smaller, cure = "rank 1", "another compressor"
        raise AttachError(
            f"compression.powersgd.rank={self.rank} compresses no parameter of this model: none is a matrix with more "
            f'values than two thin matrices of {smaller} have. Use {cure}, such as "none".'
        )

    def init(self, bucket: Bucket) -> BucketState:
        """A random Q per matrix, drawn from the parameter's name; kept and sent row by row, as Q^T."""
        dtype = _computed_in(bucket)
        start = {
            matrix.name: _random(base_seed(matrix.name, 0), (self.rank, matrix.columns), dtype, bucket.device)
            for matrix in _layout(bucket, self.rank).matrices
        }
        return BucketState(bucket, whole={_Q: start} if start else {})

    @property
    def traits(self) -> Traits:
        """Both rounds are sums; what is sent in the second depends on the sum of the first."""
        return replace(
            super().traits,
            wants_error_feedback=True,
            needs_whole_tensors=True,
            decodes_alone=False,
            sums_only=True,
            payloads_add_up=False,
            loss_gap=0.094,
        )

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """A sum of all P and of what is sent as it is, then a sum of all Q."""
        layout, size = _layout(bucket, self.rank), _computed_in(bucket).itemsize
        first = Round("sum", (size * layout.first_numel,))
        return (first, Round("sum", (size * layout.second_numel,))) if layout.matrices else (first,)

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """Two rounds for all matrices of the bucket together; one if it has none."""
        layout = _layout(state.bucket, self.rank)
        wide = flat.to(_computed_in(state.bucket))
        first, second = wide.new_empty(layout.first_numel), wide.new_empty(layout.second_numel)
        _copy_all([(first[sent], wide[place]) for place, sent in layout.plain])
        for matrix in layout.matrices:
            times_right(matrix.values(wide), state.whole[_Q][matrix.name], matrix.p(first))
        yield group.sum((first,))

        if own is not None:
            _copy_all([(own[place], flat[place]) for place, _ in layout.plain])
        _copy_all([(flat[place], first[sent]) for place, sent in layout.plain])
        if not layout.matrices:
            return
        for tall, rows in layout.talls:
            columns = first[tall].view(-1, rows, self.rank)
            columns.copy_(orthonormal(columns, self._noise(state, rows, first)))
        for matrix in layout.matrices:
            times_left(matrix.values(wide), matrix.p(first), matrix.q(second))
        alone = second.clone() if own is not None else second
        work = group.sum((second,))
        if own is not None:
            self._decode(own, layout, first, alone)
        yield work

        self._decode(flat, layout, first, second)
        # Zeros are as good a start as any: orth replaces them.
        second.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        # In place: on a GPU, memory that another stream has given must not be given back here.
        _copy_all([(state.whole[_Q][matrix.name], matrix.q(second)) for matrix in layout.matrices])

    def _decode(self, out: torch.Tensor, layout: _Layout, first: torch.Tensor, second: torch.Tensor) -> None:
        for matrix in layout.matrices:
            product(matrix.p(first), matrix.q(second), matrix.values(out))

    def _noise(self, state: BucketState, rows: int, like: torch.Tensor) -> torch.Tensor:
        key = ("powersgd.noise", rows)
        if key not in state.tables:
            state.tables[key] = _random(rows, (rows, self.rank), like.dtype, like.device)
        noise: torch.Tensor = state.tables[key]
        return noise


@dataclass(frozen=True)
class _Matrix:
    """One compressed parameter: its place in the bucket, and those of its P and Q in what is sent."""

    name: str
    rows: int
    columns: int
    rank: int
    place: slice
    p_place: slice
    q_place: slice

    def values(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.place].view(self.rows, self.columns)

    def p(self, first: torch.Tensor) -> torch.Tensor:
        return first[self.p_place].view(self.rows, self.rank)

    def q(self, second: torch.Tensor) -> torch.Tensor:
        # Transposed: multiplying by M then goes along its rows, which is twice as fast on a CPU.
        return second[self.q_place].view(self.rank, self.columns)


@dataclass(frozen=True)
class _Layout:
    """Where everything lies that the two rounds send for one bucket."""

    plain: tuple[tuple[slice, slice], ...]
    """What is sent as it is: its places in the bucket and in the first round, neighbours as one."""
    matrices: tuple[_Matrix, ...]
    """In order of rows, so that those with equally many lie side by side in the first round."""
    talls: tuple[tuple[slice, int], ...]
    """All P with equally many rows: their place in the first round, and the rows."""
    first_numel: int
    second_numel: int


@lru_cache(maxsize=1024)
def _layout(bucket: Bucket, rank: int) -> _Layout:
    segments = bucket.segments()
    plain, end = [], 0
    for low, run in groupby(segments, lambda segment: _is_low(segment[0], rank)):
        places = [place for _, place in run]
        if not low and places[-1].stop > places[0].start:
            place = slice(places[0].start, places[-1].stop)
            plain.append((place, slice(end, end + place.stop - place.start)))
            end = plain[-1][1].stop
    matrices: list[_Matrix] = []
    q_end = 0
    for tensor, place in sorted(
        (item for item in segments if _is_low(item[0], rank)), key=lambda item: item[0].shape[0]
    ):
        rows, columns = _as_matrix(tensor)
        p_place, q_place = slice(end, end + rows * rank), slice(q_end, q_end + columns * rank)
        matrices.append(_Matrix(tensor.name, rows, columns, rank, place, p_place, q_place))
        end, q_end = p_place.stop, q_place.stop
    talls = tuple(_talls(matrices))
    return _Layout(tuple(plain), tuple(matrices), talls, end, q_end)


def _talls(matrices: Sequence[_Matrix]) -> Iterator[tuple[slice, int]]:
    for rows, run in groupby(matrices, lambda matrix: matrix.rows):
        places = [matrix.p_place for matrix in run]
        yield slice(places[0].start, places[-1].stop), rows


def _as_matrix(tensor: TensorSpec) -> tuple[int, int]:
    return tensor.shape[0], tensor.numel // tensor.shape[0]


def _is_low(tensor: TensorSpec, rank: int) -> bool:
    """Whether two matrices of this rank are smaller than the tensor."""
    return rank <= _highest_rank(tensor)


def _highest_rank(tensor: TensorSpec) -> int:
    """The largest rank with rank (rows + columns) < rows * columns; 0 if there is none."""
    if len(tensor.shape) < 2 or tensor.numel == 0:
        return 0
    return (tensor.numel - 1) // sum(_as_matrix(tensor))


def _computed_in(bucket: Bucket) -> torch.dtype:
    return torch.promote_types(bucket.dtype, torch.float32)


def _copy_all(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second of each pair into the first; on a GPU by one kernel for many."""
    if pairs:
        torch._foreach_copy_([out for out, _ in pairs], [values for _, values in pairs])


def _random(seed: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers in [-1/2, 1/2) that depend on the seed and the place alone: no generator, no device, no rank."""
    places = torch.arange(shape[0] * shape[1], device=device)
    return (uniform(mix_tensor(places + mix_tensor(torch.tensor(seed, device=device)))) - 0.5).to(dtype).view(shape)
