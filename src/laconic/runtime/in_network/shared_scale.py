"""Floating-point values as integers of the same width, on a scale that all ranks share.

    e = the least exponent with |value| < 2^e for all values of a block on all ranks
    k = width - 1 - ceil(log2 n),   code = round(value 2^(k - e)),   |code| < 2^k,   decoded = 2^(e - k) sum of codes

A block is 1024 bytes of values. Ranks first agree on the largest exponent of each block, 2 bytes per block; then the
sum of n codes fits into the width of a value. float32 keeps 29 bits below the largest value of a block among 4 ranks,
more than its own 24; float16 and bfloat16 keep 13. All ranks decode the same integers, so all get the same bits. A
block with a NaN or an infinity on any rank arrives as NaN.

Reference: Sapio et al. 2021 (SwitchML), NSDI, section 3.7 and appendix C.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from laconic.runtime.in_network.frames import SUM_I16, SUM_I32, SUM_I64, Bytes

_BLOCK_BYTES = 1024
_NOT_FINITE = 2**16 - 1
_BIAS = 2**14
"""Added to exponents, so that 0 is left for a block of zeros."""
_CODES = {2: SUM_I16, 4: SUM_I32, 8: SUM_I64}
_CODE_DTYPES = {2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}
_LEAST_EXPONENT = {4: -90, 8: -900}
"""The least exponents for single and double precision: below them, powers of two in the formula underflow."""


class SharedScale:
    """The values of one tensor, coded for a sum over all ranks."""

    def __init__(self, tensor: torch.Tensor, world_size: int) -> None:
        """`tensor` must not change until its codes have been sent."""
        flat = torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor.reshape(-1)
        self._width = flat.element_size()
        # numpy has no bfloat16; single precision holds both short formats exactly.
        self._values: npt.NDArray[np.floating] = (flat.float() if self._width == 2 else flat).numpy()
        self._kept_bits = 8 * self._width - 1 - (world_size - 1).bit_length()
        self._per_block = _BLOCK_BYTES // self._width
        self._factors: npt.NDArray[np.floating] | None = None

    @property
    def code(self) -> int:
        """How codes are added up."""
        return _CODES[self._width]

    @property
    def nbytes(self) -> int:
        """Bytes of all codes, the same number as the tensor has."""
        return self._width * len(self._values)

    def exponents(self) -> npt.NDArray[np.uint16]:
        """The exponent of every block on this rank."""
        starts = np.arange(0, len(self._values), self._per_block)
        # NaN wins in both min and max, an infinity in one of them.
        largest = np.maximum.reduceat(self._values, starts) if len(starts) else self._values[:0]
        least = np.minimum.reduceat(self._values, starts) if len(starts) else self._values[:0]
        reach = np.maximum(largest, -least)
        finite = np.isfinite(reach)
        exponents = np.frexp(np.where(finite, reach, 1))[1]
        exponents = np.maximum(exponents, _LEAST_EXPONENT[self._values.itemsize]) + _BIAS
        found = np.where(finite, np.where(reach == 0, 0, exponents), _NOT_FINITE)
        return found.astype("<u2")

    def agree(self, exponents: npt.NDArray[np.uint16]) -> None:
        """Take the largest exponents over all ranks."""
        known = (exponents != 0) & (exponents != _NOT_FINITE)
        shift = np.where(known, exponents.astype(np.int32) - _BIAS - self._kept_bits, 0)
        factors = np.ldexp(np.ones(len(shift), self._values.dtype), shift)
        self._factors = np.where(exponents == _NOT_FINITE, np.nan, factors).astype(self._values.dtype)

    def codes(self, first: int, last: int) -> Bytes:
        """The codes in bytes `first` to `last` of all codes."""
        begin, end = first // self._width, last // self._width
        limit = 2**self._kept_bits - 1
        with np.errstate(all="ignore"):  # the factor of a block that is not finite is NaN
            scaled = np.rint(self._values[begin:end] / self._each(begin, end))
            if self._width < self._values.itemsize or self._kept_bits <= np.finfo(self._values.dtype).nmant + 1:
                np.clip(scaled, -limit, limit, out=scaled)
            # Limits beyond the mantissa cannot be represented, but there |scaled| < 2^k holds anyway.
            return np.nan_to_num(scaled, nan=0.0).astype(_CODE_DTYPES[self._width]).view(np.uint8)

    def decoded(self, sums: Bytes, tensor: torch.Tensor) -> torch.Tensor:
        """The sums as values, of the shape and dtype of `tensor`."""
        codes = sums.view(_CODE_DTYPES[self._width])
        values = codes.astype(self._values.dtype) * self._each(0, len(codes))
        found = torch.from_numpy(values)
        if tensor.is_complex():
            return torch.view_as_complex(found.view(*tensor.shape, 2)).to(tensor.dtype)
        return found.to(tensor.dtype).view(tensor.shape)

    def _each(self, begin: int, end: int) -> npt.NDArray[np.floating]:
        """The value of one code, for each value from `begin` to `end`."""
        assert self._factors is not None, "ranks agree on exponents first"
        blocks = self._factors[begin // self._per_block : -(-end // self._per_block)]
        offset = begin % self._per_block
        return np.repeat(blocks, self._per_block)[offset : offset + end - begin]
