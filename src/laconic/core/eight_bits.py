"""A field with one value per element in eight bits: whole multiples of a unit, which is a power of two for each block.

    unit = 2^e, the least with max |x| <= 127 unit over a block,   kept = unit * round(x / unit),   e >= -126

The values have seven significant bits, so bfloat16 holds them exactly, and rounding them again changes nothing: a saved
and restored state is the same in every bit, as long as tensors are cut into the same blocks.
"""

from __future__ import annotations

import torch

from laconic.core.plan import Bucket

_BLOCK = 256
"""Values that share a unit; no block holds values of two tensors."""
_LARGEST = 127
_LEAST_EXPONENT = -126


class EightBits:
    """The values of one bucket, zero at first; they must be finite."""

    def __init__(self, bucket: Bucket) -> None:
        self._numel = bucket.numel
        self._runs: list[tuple[slice, slice]] = []
        """Ranges of values among the codes and in the flat tensor; one range if there is no padding between them."""
        blocks = 0
        for tensor, place in bucket.segments():
            first = blocks * _BLOCK
            blocks += -(-tensor.numel // _BLOCK)
            if self._runs and self._runs[-1][0].stop == first:
                before, flat = self._runs.pop()
                self._runs.append((slice(before.start, first + tensor.numel), slice(flat.start, place.stop)))
            elif tensor.numel:
                self._runs.append((slice(first, first + tensor.numel), place))
        self.codes = torch.zeros((blocks, _BLOCK), dtype=torch.int8, device=bucket.device)
        self.exponents = torch.full((blocks,), _LEAST_EXPONENT, dtype=torch.int8, device=bucket.device)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that hold the values."""
        return {"codes": self.codes, "exponents": self.exponents}

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.codes.nbytes + self.exponents.nbytes

    def read(self) -> torch.Tensor:
        """The values, in float32."""
        wide = self.codes.to(torch.float32).mul_(_power(self.exponents.int()).unsqueeze(1)).view(-1)
        parts = [wide[place] for place, _ in self._runs]
        return parts[0] if len(parts) == 1 else torch.cat([*parts, wide[:0]])

    def write(self, values: torch.Tensor) -> None:
        """Store these values instead, rounded."""
        assert values.numel() == self._numel, f"{values.numel()} values where {self._numel} are kept"
        wide = torch.zeros(self.codes.shape, dtype=torch.float32, device=self.codes.device)
        for place, flat in self._runs:
            wide.view(-1)[place] = values[flat]
        # max = mantissa * 2^exponent, 0.5 <= mantissa < 1.
        mantissa, exponent = torch.frexp(wide.abs().amax(1))
        exponent = exponent - 7 + (mantissa * 2**7 > _LARGEST)
        exponent.masked_fill_(mantissa == 0, _LEAST_EXPONENT).clamp_(min=_LEAST_EXPONENT)
        self.exponents.copy_(exponent)
        self.codes.copy_(wide.mul_(_power(-exponent).unsqueeze(1)).round_())


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in float32, exactly, from -126 to 127."""
    return ((exponent + 127) << 23).view(torch.float32)
