"""Tensor fusion: buckets of a fixed size in backward order, as torch's DistributedDataParallel forms them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from laconic.core.plan import Bucket, Plan
from laconic.core.tensor import TensorSpec
from laconic.core.timing import Timing
from laconic.errors import InvalidSetting
from laconic.scheduling.contract import FIRST_BYTES, LATER_BYTES, Schedule, filled, one_bucket_per_kind
from laconic.settings import size


@dataclass(frozen=True, kw_only=True)
class Fusion(Schedule):
    """Collect gradients in the order in which they become ready and exchange a bucket when it is full.

    A bucket is closed by the tensor that makes its size reach the limit, per dtype and device; of a model sharded by
    FSDP, also at the end of each part whose gradients arrive together. In the first step the order is not known yet, so
    everything is sent as one bucket. These are the boundaries of torch's DDP, which is why results are equal bit for
    bit. With find_unused_parameters=True, buckets are filled in the order of registration instead and do not change, as
    in DDP with that setting.

    Reference: Li et al. 2020 (PyTorch Distributed), arXiv:2006.15704.
    """

    name: ClassVar[str] = "fusion"
    bytes: int = size(LATER_BYTES)
    """A bucket is exchanged when it holds this many bytes."""
    first_bytes: int = size(FIRST_BYTES)
    """The limit of the first bucket: small, so that the link starts working early. The default is at most `bytes`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if "first_bytes" not in self.changed_settings() or self.first_bytes < self.bytes:
            return
        # The default is never more than `bytes`: whoever asks for small buckets need not ask twice.
        usual = min(FIRST_BYTES, self.bytes)
        if self.first_bytes > self.bytes or self.first_bytes == usual:
            shown = {key: setting.show(getattr(self, key)) for key, setting in self.declared().items()}
            most = "less than that" if usual == self.bytes else "at most that"
            raise InvalidSetting(
                f"{self.axis}.{self.name}.first_bytes={shown['first_bytes']} has no effect with "
                f"bytes={shown['bytes']}, at which every bucket is sent. Give {most}, or leave it out."
            )

    @classmethod
    def with_limits(cls, first_bytes: int, limit: int) -> Fusion:
        """Buckets with these limits; a limit that is the default anyway is left out."""
        if first_bytes == min(FIRST_BYTES, limit):
            return cls(bytes=limit)
        return cls(bytes=limit, first_bytes=first_bytes)

    @property
    def bucket_limits(self) -> tuple[int, int]:
        return min(self.first_bytes, self.bytes), self.bytes

    def plan(
        self, tensors: Sequence[TensorSpec], *, observed: bool, timing: Timing | None = None, candidate: int = 0
    ) -> Plan:
        """Buckets in the order in which they fill up, unfinished ones last."""
        if not observed:
            return Plan(one_bucket_per_kind(tensors))
        return Plan(self._filled(tensors))

    def lasting_plan(self, tensors: Sequence[TensorSpec]) -> Plan:
        """The buckets of DDP with find_unused_parameters=True: filled in the order of registration, sent backwards."""
        positions = {tensor.name: index for index, tensor in enumerate(tensors)}
        by_first = sorted(self._filled(tensors), key=lambda bucket: min(positions[t.name] for t in bucket.tensors))
        return Plan(tuple(reversed(by_first)))

    def _filled(self, tensors: Sequence[TensorSpec]) -> tuple[Bucket, ...]:
        return filled(tensors, *self.bucket_limits)
