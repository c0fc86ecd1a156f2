"""The protocol between workers and servers: kinds of frames, and the contents of their notes.

    JOIN        every rank, first     note: the job's name
    CONFIGURE   rank 0, once          note: Configuration
    RESTORE     rank 0, per bucket    tensors: parameters, if servers hold them, and the state of the optimizer, or
                                      of the sum; note: the names of the latter
    REDUCE      every rank, a round   note: step, decoded     tensors: a payload; the answer: the sum
    PUSH        a rank, a step        note: step, groups ...  tensors: a payload; the answer: parameters
    REST        every rank            it waits for the others elsewhere, so no rank needs to wait for it here
    STATE       rank 0, per bucket    the answer: the state of the optimizer, or of the sum
    PULL        a rank, per bucket    the answer: the current parameters
    BYE         every rank, at last
    MISSING     a rank, afterwards    the answer's note: which ranks have not said goodbye, and the time since a request
    SLOTS       every rank, once      where sums are formed in slots; the answer's note: how many there are, the port
                                      and the tag of frames (runtime/in_network)

A request is about one bucket, so that no model is too large for a message. A note is JSON and checked field by field:
data from a network is not trusted, even with the right token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from laconic.compression import Compressor
from laconic.core.payload import Payload
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.tensor import TensorSpec
from laconic.errors import CommunicationError, one_line

JOIN, CONFIGURE, REDUCE, PUSH, REST, STATE, RESTORE, PULL, BYE, MISSING, SLOTS = range(1, 12)

_FORE_S = 5.0
LOST = "job lost: "
"""Prefix of an error that names a lost rank; if that rank is to blame, it follows directly."""
GONE = "before the end of training"
"""End of an error with the prefix LOST if that rank is gone."""
_MOST_RANKS = 2**16
_LATEST = 2**53
"""Upper bound of steps and sizes: JSON numbers up to here are exact everywhere."""
UNDECODABLE = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)
"""Errors that compressors and torch raise for invalid tensors."""

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    kind.__name__: kind
    for kind in (
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.ASGD,
    )
}
"""Optimizers a server can run: by name, so that no code is sent."""

GroupSettings = dict[str, object]
"""Settings of one parameter group: numbers, truth values and lists of them."""


def patience_s(limit_s: float) -> float:
    """How long a server lets workers wait: slightly less than their own timeout, so that it can name the cause."""
    return limit_s - min(_FORE_S, 0.1 * limit_s)


@dataclass(frozen=True)
class Configuration:
    """The description of the job for a server."""

    strategy: str
    world_size: int
    server: int
    buckets: dict[int, Bucket]
    """The buckets of this server."""
    optimizer: str = ""
    """The optimizer it runs; empty: it only forms sums."""
    groups: tuple[GroupSettings, ...] = ()
    group_of: tuple[tuple[str, int], ...] = ()
    """The parameter group of each parameter; -1: in none, so it does not change."""
    timeout_s: float = 300.0
    """How long a rank may wait for others."""

    def write(self) -> str:
        """As a note."""
        return json.dumps(
            {
                "strategy": self.strategy,
                "world_size": self.world_size,
                "server": self.server,
                "optimizer": self.optimizer,
                "groups": self.groups,
                "group_of": self.group_of,
                "timeout_s": self.timeout_s,
                "buckets": {
                    str(number): [
                        [t.name, list(t.shape), str(t.dtype).removeprefix("torch."), t.part_of, t.start, t.outermost]
                        for t in bucket.tensors
                    ]
                    for number, bucket in self.buckets.items()
                },
            }
        )

    @classmethod
    def read(cls, note: str) -> Configuration:
        """Read a note; raises CommunicationError unless `write` could have written it."""
        document = read_note(note)
        try:
            buckets = {
                int(number): Bucket(tuple(_spec(*entry) for entry in tensors))
                for number, tensors in document["buckets"].items()
            }
            configuration = cls(
                str(document["strategy"]),
                whole(document, "world_size", at_least=1, at_most=_MOST_RANKS),
                whole(document, "server"),
                buckets,
                str(document["optimizer"]),
                tuple(group_settings(group) for group in document["groups"]),
                tuple((str(name), int(index)) for name, index in document["group_of"]),
                float(document["timeout_s"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as exc:
            raise CommunicationError(f"a server cannot read its configuration: {one_line(exc)}.") from exc
        configuration._check()
        return configuration

    def _check(self) -> None:
        if self.optimizer and self.optimizer not in OPTIMIZERS:
            raise CommunicationError(f'a server cannot run the optimizer "{one_line(self.optimizer, 60)}".')
        if not 0 < self.timeout_s < math.inf:
            raise CommunicationError(f"timeout_s of a server must be > 0 and finite, got {self.timeout_s:g}.")
        for number, bucket in self.buckets.items():
            if not bucket.tensors or len({tensor.dtype for tensor in bucket.tensors}) > 1:
                raise CommunicationError(f"bucket {number} of a server must have tensors, all of one dtype.")
        known = dict(self.group_of)
        held = [tensor.name for bucket in self.buckets.values() for tensor in bucket.tensors] if self.optimizer else []
        for name in held:
            if not -1 <= known.get(name, -2) < len(self.groups):
                raise CommunicationError(f'the configuration lacks the parameter group of "{one_line(name, 60)}".')


def _spec(name: str, shape: list[int], dtype: str, *place: str | int) -> TensorSpec:
    part_of, start, outermost = str(place[0]), *map(int, place[1:])
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ValueError(f'"{one_line(dtype, 40)}" is not a dtype of parameters')
    sizes = tuple(int(size) for size in shape)
    if any(size < 0 for size in sizes) or math.prod(sizes) > _LATEST:
        raise ValueError(f'parameter "{one_line(name, 40)}" has the shape {one_line(sizes, 60)}')
    if not 0 <= outermost < max(1, len(sizes)):
        raise ValueError(f'parameter "{one_line(name, 40)}" has no dimension {one_line(outermost, 40)}')
    return TensorSpec(str(name), sizes, kind, part_of=part_of, start=start, outermost=outermost)


def read_note(note: str) -> Mapping[str, Any]:
    """A note as a dictionary; raises CommunicationError if it is something else."""
    try:
        document = json.loads(note)
    except (ValueError, RecursionError) as exc:
        raise CommunicationError(f"the note of a request is not JSON: {one_line(exc)}.") from exc
    if not isinstance(document, dict):
        raise CommunicationError(f"the note of a request must be a JSON object, got {one_line(note, 60)}.")
    return document


def whole(document: Mapping[str, Any], key: str, *, at_least: int = 0, at_most: int = _LATEST) -> int:
    """A whole number of a note; raises CommunicationError if it is missing, something else or out of range."""
    value = document.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not at_least <= value <= at_most:
        raise CommunicationError(
            f'a note must have a whole number from {at_least} to {at_most} as "{key}", got {one_line(value, 40)}.'
        )
    return value


def wholes(document: Mapping[str, Any], key: str) -> list[int]:
    """A list of whole numbers of a note."""
    values = document.get(key)
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise CommunicationError(f'a note must have a list of whole numbers as "{key}", got {one_line(values, 40)}.')
    return values


def flag(document: Mapping[str, Any], key: str) -> bool:
    """A truth value of a note."""
    value = document.get(key)
    if not isinstance(value, bool):
        raise CommunicationError(f'a note must have true or false as "{key}", got {one_line(value, 40)}.')
    return value


def decode_payload(
    tensors: tuple[torch.Tensor, ...], out: torch.Tensor, compression: Compressor, state: BucketState
) -> None:
    """Decode a rank's payload into `out`; raises CommunicationError if it does not fit this bucket."""
    rank = state.moment.rank
    expected = compression.payload_bytes(state.bucket, state.moment)
    found = sum(tensor.nbytes for tensor in tensors)
    # Before decoding: compiled loops do not check sizes.
    if found != expected:
        raise CommunicationError(f"a payload of rank {rank} has {found} bytes, expected {expected}.")
    try:
        compression.decode(Payload(tensors), out, state)
    except UNDECODABLE as exc:
        raise CommunicationError(f"a payload of rank {rank} cannot be decoded: {one_line(exc)}.") from exc


def group_settings(group: Mapping[str, object]) -> GroupSettings:
    """The settings of a parameter group that can be sent; raises CommunicationError for one that cannot."""
    found: GroupSettings = {}
    for key, value in group.items():
        if key == "params":
            continue
        value = tuple(map(_number, value)) if isinstance(value, list | tuple) else _number(value)
        items = value if isinstance(value, tuple) else (value,)
        if not all(item is None or isinstance(item, bool | int | float | str) for item in items):
            raise CommunicationError(
                f'the optimizer has a {type(value).__name__} as "{one_line(key, 40)}", which cannot be sent to a '
                "server. Use a number."
            )
        found[str(key)] = value
    return found


def _number(value: object) -> object:
    """A tensor of one number, such as a learning rate on a GPU, as that number."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
