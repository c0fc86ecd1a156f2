"""What workers and servers say to each other: kinds of frames, and what their notes hold.

    CONFIGURE   rank 0, once          note: Configuration     tensors: parameters of each bucket, if servers hold them
    REDUCE      every rank, a round   note: step, decoded     tensors: a payload; the answer: the sum
    PUSH        a rank, a step        note: step, groups ...  tensors: a payload; the answer: parameters
    STATE       rank 0                the answer: parameters and what the optimizer remembers
    RESTORE     rank 0                tensors: the same
    PULL        a rank                the answer: parameters as they are
    BYE         every rank, at last

A note is JSON and checked field by field: what comes from a network is not to be trusted, even with the right token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.errors import CommunicationError, one_line

CONFIGURE, REDUCE, PUSH, STATE, RESTORE, PULL, BYE = range(1, 8)

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
"""Optimizers a server can run: by name, so that no code travels."""

GroupSettings = dict[str, object]
"""Settings of one parameter group: numbers, truth values and lists of them."""


@dataclass(frozen=True)
class Configuration:
    """What a server must know about the job."""

    strategy: str
    world_size: int
    server: int
    buckets: dict[int, Bucket]
    """Those this server looks after."""
    optimizer: str = ""
    """The optimizer it runs; empty: it only forms sums."""
    groups: tuple[GroupSettings, ...] = ()
    group_of: tuple[tuple[str, int], ...] = ()
    """The parameter group of each parameter."""

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
                "buckets": {
                    str(number): [[t.name, list(t.shape), str(t.dtype).removeprefix("torch.")] for t in bucket.tensors]
                    for number, bucket in self.buckets.items()
                },
            }
        )

    @classmethod
    def read(cls, note: str) -> Configuration:
        """From a note; raises CommunicationError where it is not what `write` gives."""
        document = read_note(note)
        try:
            buckets = {
                int(number): Bucket(tuple(_spec(*entry) for entry in tensors))
                for number, tensors in document["buckets"].items()
            }
            configuration = cls(
                str(document["strategy"]),
                int(document["world_size"]),
                int(document["server"]),
                buckets,
                str(document["optimizer"]),
                tuple(group_settings(group) for group in document["groups"]),
                tuple((str(name), int(index)) for name, index in document["group_of"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise CommunicationError(f"a server was given a configuration it cannot read: {one_line(exc)}.") from exc
        if configuration.optimizer and configuration.optimizer not in OPTIMIZERS:
            raise CommunicationError(f'a server cannot run the optimizer "{one_line(configuration.optimizer, 60)}".')
        return configuration


def _spec(name: str, shape: list[int], dtype: str) -> TensorSpec:
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ValueError(f'"{one_line(dtype, 40)}" is no type of parameter')
    return TensorSpec(str(name), tuple(int(size) for size in shape), kind)


def read_note(note: str) -> Mapping[str, Any]:
    """A note as a table; raises CommunicationError if it is something else."""
    try:
        document = json.loads(note)
    except (ValueError, RecursionError) as exc:
        raise CommunicationError(f"a server was sent a note that is not JSON: {one_line(exc)}.") from exc
    if not isinstance(document, dict):
        raise CommunicationError(f"a server was sent a note that is no table: {one_line(note, 60)}.")
    return document


def group_settings(group: Mapping[str, object]) -> GroupSettings:
    """The settings of a parameter group that can be sent; raises CommunicationError for one that cannot."""
    found: GroupSettings = {}
    for key, value in group.items():
        if key == "params":
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, list | tuple):
            value = tuple(cast(float, item) for item in value)
        elif value is not None and not isinstance(value, bool | int | float | str):
            raise CommunicationError(
                f'the optimizer has a {type(value).__name__} as "{one_line(key, 40)}", which cannot be sent to a '
                "server. Use a number."
            )
        found[str(key)] = value
    return found
