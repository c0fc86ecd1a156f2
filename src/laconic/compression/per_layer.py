"""Compress some parameters and send others uncompressed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import ClassVar

import torch

from laconic.compression.contract import Wrapper, uncompressed, uncompressed_rounds
from laconic.compression.traits import Traits
from laconic.core.exchange import Exchange, Group, Round, in_lockstep
from laconic.core.moment import Moment
from laconic.core.optimizer_facts import OptimizerFacts
from laconic.core.payload import Payload
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.tensor import TensorSpec
from laconic.errors import AttachError, InvalidSetting
from laconic.settings import count, pattern


@dataclass(frozen=True, kw_only=True)
class PerLayer(Wrapper):
    """Leave some parameters uncompressed, by name or size, and compress the others.

        decoded = g  for parameters that are skipped,   decode(C(g))  for the others

    Both kinds are sent at the same time: where both have a round, one wait covers both.
    """

    name: ClassVar[str] = "per_layer"
    good_for: ClassVar[str] = "parameters unlike the rest, such as embeddings"
    needs_loss: ClassVar[bool] = True

    skip: str = pattern("")
    """Parameters whose name matches one of these patterns stay uncompressed."""
    min_numel: int = count(0)
    """Parameters with fewer elements stay uncompressed."""
    min_dims: int = count(2)
    """Parameters with fewer dimensions stay uncompressed: biases and normalizations have one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_numel == 1:
            raise InvalidSetting(
                f"{self.axis}.{self.name}.min_numel=1 has no effect: every parameter has an element. Give at least 2, "
                "or leave it out."
            )

    def traits_around(self, inner: Traits) -> Traits:
        """Parameters are chosen by their name and shape."""
        return replace(inner, needs_whole_tensors=True, by_name=bool(self.skip), sends_every_value=False)

    def check(self, tensors: Sequence[TensorSpec], optimizer: OptimizerFacts) -> None:
        """Raise if nothing is left to compress, if no name matches, or if all that match are skipped anyway."""
        if self.skip and not any(_matches(tensor.name, self.skip) for tensor in tensors):
            raise AttachError(
                f'compression.per_layer.skip="{self.skip}" matches no parameter of this model, whose first is '
                f'"{tensors[0].name}". Patterns match whole names: "*norm*" matches any name that contains "norm".'
            )
        if self.skip and all(self._is_small(tensor) for tensor in tensors if _matches(tensor.name, self.skip)):
            raise AttachError(
                f'compression.per_layer.skip="{self.skip}" has no effect on this model: every parameter it matches is '
                f"skipped for its shape anyway (min_numel={self.min_numel}, min_dims={self.min_dims}). Leave skip out."
            )
        chosen = [tensor for tensor in tensors if not self._skips(tensor)]
        if not chosen:
            raise AttachError(
                f'compression "{self}" compresses no parameter of this model: per_layer skips all {len(tensors)}. '
                'Let it skip fewer, or use "none".'
            )
        self.inner.check(chosen, optimizer)

    def _is_small(self, tensor: TensorSpec) -> bool:
        return tensor.numel < self.min_numel or len(tensor.shape) < self.min_dims

    def _skips(self, tensor: TensorSpec) -> bool:
        return self._is_small(tensor) or _matches(tensor.name, self.skip)

    def _split(self, bucket: Bucket) -> _Split:
        return _split(bucket, tuple(self._skips(tensor) for tensor in bucket.tensors))

    def init(self, bucket: Bucket) -> BucketState:
        """The inner state of the compressed parameters."""
        chosen = self._split(bucket).chosen
        return BucketState(bucket, parts=[self.inner.init(chosen.bucket)] if chosen else [])

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """One plain sum of the skipped parameters, and the inner compressor's rounds for the rest."""
        split = self._split(bucket)
        plain = uncompressed_rounds(split.skipped.bucket) if split.skipped else ()
        return plain + (self.inner.rounds(split.chosen.bucket, moment) if split.chosen else ())

    def num_waits(self, bucket: Bucket, moment: Moment) -> int:
        """As many as the longer of the two exchanges has."""
        split = self._split(bucket)
        inner = self.inner.num_waits(split.chosen.bucket, moment) if split.chosen else 0
        return max(inner, 1 if split.skipped else 0)

    def encode(self, flat: torch.Tensor, state: BucketState) -> Payload:
        """The skipped parameters as one tensor, then the inner payload."""
        split = self._split(state.bucket)
        skipped = (split.skipped.taken_from(flat),) if split.skipped else ()
        inner = self.inner.encode(split.chosen.taken_from(flat), state.part(0)).tensors if split.chosen else ()
        return Payload(skipped + inner)

    def decode(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """Each part at its positions."""
        split = self._split(state.bucket)
        tensors = payload.tensors
        if split.skipped:
            split.skipped.put_into(out, tensors[0])
            tensors = tensors[1:]
        if split.chosen:
            chosen = torch.empty(split.chosen.bucket.numel, dtype=out.dtype, device=out.device)
            self.inner.decode(Payload(tensors), chosen, state.part(0))
            split.chosen.put_into(out, chosen)

    def add_decoded(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """Both parts at once."""
        one = torch.empty_like(out)
        self.decode(payload, one, state)
        out += one

    def payload_bytes(self, bucket: Bucket, moment: Moment) -> int:
        """Of both parts."""
        split = self._split(bucket)
        skipped = split.skipped.bucket.nbytes if split.skipped else 0
        return skipped + (self.inner.payload_bytes(split.chosen.bucket, moment) if split.chosen else 0)

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """Both exchanges in lockstep."""
        split = self._split(state.bucket)
        if split.chosen is None:
            yield from uncompressed(flat, group, own)
        elif split.skipped is None:
            part = state.part(0)
            part.owed = state.owed
            yield from self.inner.exchange(flat, part, group, own)
        else:
            skipped, chosen = split.skipped.taken_from(flat), split.chosen.taken_from(flat)
            sent = None if own is None else torch.empty_like(chosen)
            if own is not None:
                split.skipped.put_into(own, skipped)
            part = state.part(0)
            part.owed = None if state.owed is None else split.chosen.taken_from(state.owed)
            yield from in_lockstep(uncompressed(skipped, group), self.inner.exchange(chosen, part, group, sent))
            if state.owed is not None and part.owed is not None:
                split.chosen.put_into(state.owed, part.owed)
            split.skipped.put_into(flat, skipped)
            split.chosen.put_into(flat, chosen)
            if own is not None and sent is not None:
                split.chosen.put_into(own, sent)


@dataclass(frozen=True)
class _Part:
    """Some of a bucket's tensors as a bucket of their own, and their positions in the whole one."""

    bucket: Bucket
    places: tuple[slice, ...]

    def taken_from(self, flat: torch.Tensor) -> torch.Tensor:
        return torch.cat([flat[place] for place in self.places])

    def put_into(self, flat: torch.Tensor, values: torch.Tensor) -> None:
        sizes = [place.stop - place.start for place in self.places]
        for place, piece in zip(self.places, values.split(sizes), strict=True):
            flat[place] = piece


@dataclass(frozen=True)
class _Split:
    skipped: _Part | None
    chosen: _Part | None


@lru_cache(maxsize=1024)
def _split(bucket: Bucket, skipped: tuple[bool, ...]) -> _Split:
    return _Split(_part(bucket, skipped), _part(bucket, tuple(not skip for skip in skipped)))


def _part(bucket: Bucket, taken: tuple[bool, ...]) -> _Part | None:
    segments = [segment for segment, take in zip(bucket.segments(), taken, strict=True) if take]
    if not segments:
        return None
    places: list[slice] = []
    for _, place in segments:
        if places and places[-1].stop == place.start:
            places[-1] = slice(places[-1].start, place.stop)
        else:
            places.append(place)
    return _Part(Bucket(tuple(tensor for tensor, _ in segments)), tuple(places))


@lru_cache(maxsize=65536)
def _matches(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, one) for one in patterns.split("|"))
