"""Rotate values so that all blocks have similar distributions, and send them as integers that can be summed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.contract import Compressor
from laconic.compression.kernels.lanes import new_numbers, pack, unpack
from laconic.compression.kernels.reference.quantizers import SMALLEST_SCALE
from laconic.compression.kernels.rotated_grid import decode, encode
from laconic.compression.kernels.rotation import sums_of_squares
from laconic.compression.kernels.shared_grid import Grid
from laconic.compression.traits import Traits, computed_once
from laconic.compression.wire.lanes import Lanes
from laconic.compression.wire.rotation import Rotation, rotation_of
from laconic.compression.wire.seeds import moment_seed
from laconic.core.exchange import Exchange, Group, Round
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.settings import count, number


@dataclass(frozen=True, kw_only=True)
class Thc(Compressor):
    """Rotate blocks at random, agree on a scale for each, and sum the indices of points on a common grid.

        x_i = H D g_i for each block,   s = (sum_i |g_i|^4)^(1/4) / sqrt(size),   unit = 2 clip s / levels
        code_i = floor((x_i + clip s) / unit + u),  0 <= code_i <= levels,   u uniform in [0, 1)
        decoded = D H (unit * sum_i code_i - n clip s)

    H is the orthonormal Hadamard matrix and D a diagonal of random signs, the same on every rank and new in each step.
    Rotated values are close to normally distributed whatever the gradient is, so one grid fits all blocks and an
    outlier is spread over its block. A first round of 8 bytes a block agrees on s, which lies between the largest
    |g_i| = |x_i| of all ranks and n^(1/4) times that, divided by sqrt(size); a second sums the codes in as many bits
    as n * (levels + 1) values need. Nothing is rounded twice. Values beyond `clip` s are clipped.

    The paper's table of 16 of the 31 points saves bits on the way to a server, where single codes are sent; where sums
    are sent every point costs the same, so all are used. A block with a NaN or an infinity arrives as NaN, and so does
    a block whose values are so large that a sum of them could be infinite.

    Reference: Li et al. 2023, arXiv:2302.08545.
    """

    name: ClassVar[str] = "thc"
    family: ClassVar[str] = "quantization"
    good_for: ClassVar[str] = "integers through plain sums where gradients have outliers"

    levels: int = count(30, at_least=1, at_most=1 << 20)
    """Steps of the grid; with 30, four ranks need 7 bits a value."""
    clip: float = number(3.0, above=0.0, at_most=100.0)
    """How far the grid reaches, in units of s."""
    block: int = count(1024, at_least=32, at_most=65536)
    """Values rotated together, rounded down to a power of two; the rest of a parameter is cut into shorter blocks."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """Both rounds are sums; codes cannot be decoded without the scale. Unbiased except for clipping."""
        return replace(
            super().traits,
            decodes_alone=False,
            sums_only=True,
            payloads_add_up=False,
            loss_gap=-0.017,
            loss_deviation=0.028,
        )

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """The scales of all blocks, then the codes."""
        blocks = Rotation(bucket, self.block).num_chunks
        return Round("sum", (8 * blocks,)), Round("sum", (self._lanes(bucket, moment.world_size).nbytes,))

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """Agree on scales, then add up codes."""
        rotation = rotation_of(state, self.block)
        shared = moment_seed(state.moment, shared=True)
        scales = sums_of_squares(flat, rotation).square_()
        yield group.sum((scales,))

        # Square roots, not a power: twice the input then gives exactly twice the scale.
        norms, roots = scales.sqrt().sqrt(), rotation.lengths.double().sqrt()
        # Sums inside of a transform are at most the norm times the root; beyond float32 they would be infinite.
        norms = torch.where(norms * roots < torch.finfo(torch.float32).max, norms, torch.nan)
        reach = self.clip * (norms / roots).float()
        # Blocks of zeros, and of values too small for arithmetic in float32, have a unit of zero and arrive as zeros;
        # blocks with a value that is not finite have no unit.
        reach = torch.where(reach < SMALLEST_SCALE * self.levels, 0.0, reach)
        grid = Grid(2 * reach / self.levels, reach, 0, self.levels)
        lanes = self._lanes(state.bucket, group.size)
        codes = new_numbers(lanes, grid.dtype, flat.device)
        encode(flat, rotation, shared, grid, moment_seed(state.moment), codes=codes[: flat.numel()])
        words = pack(lanes, codes)
        if own is not None:
            decode(codes[: flat.numel()], 1, rotation, shared, grid, out=own)
        yield group.sum((words,))
        decode(unpack(lanes, words), group.size, rotation, shared, grid, out=flat)

    def _lanes(self, bucket: Bucket, world_size: int) -> Lanes:
        return Lanes(bucket.numel, self.levels, world_size)
