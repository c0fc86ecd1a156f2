"""What a compressor promises.

A single-round method writes `encode`, `decode` and `summable`; a method with several rounds writes `exchange`
itself. `rounds` prices either without running it, and what it says must equal what the transport counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from laconic.core.exchange import Exchange, Group, Round
from laconic.core.payload import Payload
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.transport import AllWork
from laconic.errors import StrategyError
from laconic.settings import Method, found


@dataclass(frozen=True, kw_only=True)
class Compressor(Method):
    """WHAT goes on the wire."""

    axis: ClassVar[str] = "compression"
    lossless: ClassVar[bool] = False
    """The receiver gets exactly what was sent, so there is no error to feed back."""
    summable: ClassVar[bool] = True
    """The sum of encoded payloads decodes to the sum of the inputs, so an all-reduce can carry it; else payloads are
    gathered and decoded one by one."""
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    """Gradient dtypes it can carry."""

    def init(self, bucket: Bucket) -> BucketState:
        """The state before the first step."""
        return BucketState()

    def encode(self, flat: torch.Tensor, state: BucketState) -> Payload:
        """What this rank sends for `flat`; may update `state`, must not change `flat` unless it is the payload."""
        raise NotImplementedError

    def decode(self, payload: Payload, out: torch.Tensor) -> None:
        """Write what `payload` stands for into `out`."""
        raise NotImplementedError

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """Replace `flat` by its sum over the group, as seen through this compressor.

        own: filled with what this rank contributed to that sum, for a wrapper that needs to know what was lost.
        """
        payload = self.encode(flat, state)
        if own is not None:
            self.decode(payload, own)
        if self.summable:
            yield group.sum(payload.tensors)
            self.decode(payload, flat)
            return
        gathered = [group.gather(tensor) for tensor in payload.tensors]
        yield AllWork([work for work, _ in gathered])
        one = torch.empty_like(flat)
        flat.zero_()
        for rank in range(group.size):
            self.decode(Payload(tuple(rows[rank] for _, rows in gathered)), one)
            flat += one

    def rounds(self, bucket: Bucket) -> tuple[Round, ...]:
        """What one exchange of `bucket` sends, without running it."""
        raise NotImplementedError

    def layers(self) -> Iterator[Compressor]:
        """This compressor, then what it wraps, from the outside in."""
        yield self


@dataclass(frozen=True, kw_only=True)
class Wrapper(Compressor):
    """Adds something to any compressor; written after a `+`."""

    needs_loss: ClassVar[bool] = False
    """Without effect on a compressor that loses nothing, so it is refused there."""
    inner: Compressor = field(kw_only=False)
    """What it wraps."""

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Compressor):
            raise StrategyError(
                f"compression.{self.name} wraps a Compressor object, got {found(self.inner)}. "
                f"Write e.g. {type(self).__name__}(Fp16())."
            )
        super().__post_init__()

    def init(self, bucket: Bucket) -> BucketState:
        """The inner state; a wrapper adds its own fields."""
        return self.inner.init(bucket)

    def rounds(self, bucket: Bucket) -> tuple[Round, ...]:
        """What the inner compressor sends."""
        return self.inner.rounds(bucket)

    def layers(self) -> Iterator[Compressor]:
        """This wrapper, then what it wraps."""
        yield self
        yield from self.inner.layers()

    def __str__(self) -> str:
        return f"{self.inner} + {self.call_text()}"
