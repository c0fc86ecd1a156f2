"""The base of low-rank methods: which parameters are matrices, and the layout of their two thin factors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import ClassVar

import torch

from laconic.compression.contract import Compressor
from laconic.compression.traits import Traits, computed_once
from laconic.compression.wire.seeds import mix_tensor, uniform
from laconic.core.optimizer_facts import OptimizerFacts
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState, Factors
from laconic.core.tensor import TensorSpec
from laconic.errors import AttachError
from laconic.settings import count


@dataclass(frozen=True, kw_only=True)
class LowRank(Compressor):
    """A compressor that sends matrices as products of two thin ones, P (rows x rank) and Q (columns x rank).

    A parameter is a matrix of its first dimension x all others. A parameter that is no matrix, or with rank (rows +
    columns) >= rows * columns, is sent uncompressed. Methods compute in float32, in float64 where gradients are
    float64.
    """

    family: ClassVar[str] = "low_rank"

    rank: int = count(4, at_least=1)
    """Columns of the two thin matrices: more of them keep more and send more."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """Every round is a sum; payloads depend on earlier sums, which every rank keeps."""
        return replace(
            super().traits,
            wants_error_feedback=True,
            needs_whole_tensors=True,
            decodes_alone=False,
            sums_only=True,
            linear=True,
            payloads_add_up=False,
            rounds_by_place=True,
        )

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
            f"compression.{self.name}.rank={self.rank} compresses no parameter of this model: no parameter is a matrix "
            f'with more values than its two factors of {smaller} would have. Use {cure}, such as "none".'
        )

    def noise(self, state: BucketState, rows: int, like: torch.Tensor) -> torch.Tensor:
        """Random columns that replace linearly dependent ones when a basis is made."""
        key = ("low_rank.noise", rows)
        if key not in state.tables:
            state.tables[key] = random_matrix(rows, (rows, self.rank), like.dtype, like.device)
        noise: torch.Tensor = state.tables[key]
        return noise

    def note_factors(self, state: BucketState, matrix: Matrix, p: torch.Tensor, q: torch.Tensor) -> None:
        """Hand the decoded P and Q^T of a matrix to the synchronization rule, if the rule has requested them."""
        if state.factors is not None:
            # Copies: a method may keep the same memory for the next step, or remove values that are not finite.
            state.factors[matrix.name] = Factors(p.clone(), q.clone())


@dataclass(frozen=True)
class Matrix:
    """One compressed parameter: its position in the bucket, and those of its P and Q in the payloads."""

    name: str
    rows: int
    columns: int
    rank: int
    place: slice
    p_place: slice
    q_place: slice

    def values(self, flat: torch.Tensor) -> torch.Tensor:
        """The matrix itself, in the flat tensor."""
        return flat[self.place].view(self.rows, self.columns)

    def p(self, first: torch.Tensor) -> torch.Tensor:
        """Its P, after the uncompressed values."""
        return first[self.p_place].view(self.rows, self.rank)

    def q(self, second: torch.Tensor) -> torch.Tensor:
        """Its Q^T, among those of all matrices."""
        # Transposed: multiplying by M then goes along its rows, which is twice as fast on a CPU.
        return second[self.q_place].view(self.rank, self.columns)


@dataclass(frozen=True)
class Layout:
    """The layout of the two rounds of one bucket."""

    plain: tuple[tuple[slice, slice], ...]
    """Uncompressed values: their ranges in the bucket and in the first round, adjacent ones merged."""
    matrices: tuple[Matrix, ...]
    """Matrices in order of rows, so that those with equal rows are adjacent in the first round."""
    talls: tuple[tuple[slice, int], ...]
    """All P with the same number of rows: their range in the first round, and the rows."""
    plain_numel: int
    """The number of uncompressed values, which come before the first P."""
    first_numel: int
    """The number of uncompressed values and of values of all P."""
    second_numel: int
    """The number of values of all Q."""


@lru_cache(maxsize=1024)
def layout_of(bucket: Bucket, rank: int) -> Layout:
    """The layout of a bucket's factors and uncompressed values."""
    segments = bucket.segments()
    plain, end = [], 0
    for low, run in groupby(segments, lambda segment: _is_low(segment[0], rank)):
        places = [place for _, place in run]
        if not low and places[-1].stop > places[0].start:
            place = slice(places[0].start, places[-1].stop)
            plain.append((place, slice(end, end + place.stop - place.start)))
            end = plain[-1][1].stop
    matrices: list[Matrix] = []
    plain_numel, q_end = end, 0
    for tensor, place in sorted(
        (item for item in segments if _is_low(item[0], rank)), key=lambda item: _as_matrix(item[0])[0]
    ):
        rows, columns = _as_matrix(tensor)
        p_place, q_place = slice(end, end + rows * rank), slice(q_end, q_end + columns * rank)
        matrices.append(Matrix(tensor.name, rows, columns, rank, place, p_place, q_place))
        end, q_end = p_place.stop, q_place.stop
    talls = tuple(_talls(matrices))
    return Layout(tuple(plain), tuple(matrices), talls, plain_numel, end, q_end)


def _talls(matrices: Sequence[Matrix]) -> Iterator[tuple[slice, int]]:
    for rows, run in groupby(matrices, lambda matrix: matrix.rows):
        places = [matrix.p_place for matrix in run]
        yield slice(places[0].start, places[-1].stop), rows


def _as_matrix(tensor: TensorSpec) -> tuple[int, int]:
    """Rows and columns: the first dimension by all others, or the transpose of that if the tensor is stored so."""
    rows = tensor.shape[tensor.outermost]
    return rows, tensor.numel // rows


def _is_low(tensor: TensorSpec, rank: int) -> bool:
    """Whether two matrices of this rank are smaller than the tensor."""
    return rank <= _highest_rank(tensor)


def _highest_rank(tensor: TensorSpec) -> int:
    """The largest rank with rank (rows + columns) < rows * columns; 0 if there is none."""
    if len(tensor.shape) < 2 or tensor.numel == 0:
        return 0
    return (tensor.numel - 1) // sum(_as_matrix(tensor))


def computed_in(bucket: Bucket) -> torch.dtype:
    """The dtype of factors: float32, or float64 where gradients are."""
    return torch.promote_types(bucket.dtype, torch.float32)


def copy_all(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second of each pair into the first; on a GPU by one kernel for many."""
    if pairs:
        torch._foreach_copy_([out for out, _ in pairs], [values for _, values in pairs])


def random_matrix(seed: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers in [-1/2, 1/2) that depend only on seed and position, not on a generator, device or rank."""
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)  # torch would import its compiler to find the shape
    places = torch.arange(shape[0] * shape[1], device=device)
    return (uniform(mix_tensor(places + mix_tensor(torch.tensor(seed, device=device)))) - 0.5).to(dtype).view(shape)
