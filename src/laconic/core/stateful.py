"""State that can be inspected, saved and restored."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch

from laconic.core.eight_bits import EightBits
from laconic.core.moment import Moment
from laconic.core.plan import Bucket


class Stateful(Protocol):
    """The state_dict contract of torch and torch.distributed.checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue, as plain containers and tensors."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        ...


ParameterState = dict[str, dict[str, torch.Tensor]]
"""parameter name -> field -> tensor: the form in which state is saved, whatever the buckets were."""

Resize = Literal["sum", "copy", "reset"]
"""How a field is converted when the number of workers changes.

sum: only the sum over ranks counts; the values of a rank that leaves are added to a survivor's, and a new rank starts
from zero. copy: all ranks hold the same, and so do new ones. reset: it starts anew.
"""


CARRIED = "carried.gradient"
"""The field with the residual of an earlier strategy of the session: added to the next exchange, then removed."""


class Factors(NamedTuple):
    """Two thin matrices whose product a low-rank compressor has decoded for one parameter."""

    left: torch.Tensor
    """rows x rank."""
    right: torch.Tensor
    """rank x columns."""


@dataclass
class BucketState:
    """The state of a compressor for one bucket between steps.

    `flat` fields hold one value per element of the bucket and can be cut by parameter, `packed` ones do so in eight
    bits each; `whole` fields belong to one parameter each (field -> parameter name -> tensor). Field names start with
    the name of the method that owns them.
    """

    bucket: Bucket
    flat: dict[str, torch.Tensor] = field(default_factory=dict)
    whole: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    packed: dict[str, EightBits] = field(default_factory=dict)
    parts: list[BucketState] = field(default_factory=list)
    """States of other buckets that together hold this one's tensors, for a method that treats tensors differently."""
    moment: Moment = field(default_factory=Moment)
    """The coming exchange; set by the code that runs it, never saved."""
    owed: torch.Tensor | None = None
    """Per element, the loss of the sums that this rank has sent back, to be added to the next ones; None: it is
    dropped. Set by error feedback around an exchange; never saved from here."""
    tables: dict[Hashable, Any] = field(default_factory=dict)
    """A cache of values that follow from the bucket alone; never saved."""
    measure: bool = False
    """Whether `metrics` of the coming exchange are requested."""
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    """Measurements of the last exchange for which they were requested: scalars, still on the bucket's device."""
    factors: dict[str, Factors] | None = None
    """Where a synchronization rule requests them for the coming exchange: the factors of each parameter that the
    compressor has decoded as a product of two, equal on all ranks. None: not requested. Never saved."""

    def per_element(self) -> frozenset[str]:
        """Names of the fields that hold one value per element."""
        return frozenset({*self.flat, *self.packed}).union(*(part.per_element() for part in self.parts))

    @property
    def nbytes(self) -> int:
        """Bytes of all fields, here and in the parts."""
        own = [*self.flat.values(), *self.packed.values()]
        own += [value for values in self.whole.values() for value in values.values()]
        return sum(value.nbytes for value in own) + sum(part.nbytes for part in self.parts)

    def part(self, index: int) -> BucketState:
        """One of the parts, prepared for the same exchange as this state."""
        part = self.parts[index]
        part.moment, part.measure, part.metrics = self.moment, self.measure, self.metrics
        part.factors = self.factors
        return part

    def rescale(self, ratio: torch.Tensor | float, fields: Collection[str]) -> None:
        """Multiply the values of these fields by `ratio`, here and in the parts."""
        for name in self.flat.keys() & set(fields):
            _multiply(self.flat[name], ratio)
        for name in self.packed.keys() & set(fields):
            values = self.packed[name].read()
            _multiply(values, ratio)
            self.packed[name].write(values)
        for name in self.whole.keys() & set(fields):
            for value in self.whole[name].values():
                _multiply(value, ratio)
        for part in self.parts:
            part.rescale(ratio, fields)

    def start_anew(self, fields: Collection[str], fresh: BucketState) -> None:
        """Reset these fields to their initial values, here and in the parts."""
        for name in self.flat.keys() & set(fields):
            self.flat[name].copy_(fresh.flat[name])
        for name in self.packed.keys() & set(fields):
            self.packed[name].write(fresh.packed[name].read())
        for part, anew in zip(self.parts, fresh.parts, strict=True):
            part.start_anew(fields, anew)

    def by_parameter(self) -> ParameterState:
        """The same state keyed by parameter name, independent of how tensors were grouped."""
        saved: ParameterState = {}
        # bfloat16 holds packed values exactly.
        per_element = self.flat | {name: packed.read().to(torch.bfloat16) for name, packed in self.packed.items()}
        for tensor, place in self.bucket.segments():
            fields = {name: flat[place].reshape(tensor.shape) for name, flat in per_element.items()}
            fields |= {name: values[tensor.name] for name, values in self.whole.items() if tensor.name in values}
            if fields:
                saved[tensor.name] = fields
        for part in self.parts:
            for name, fields in part.by_parameter().items():
                saved.setdefault(name, {}).update(fields)
        return saved

    def restore(self, saved: ParameterState) -> None:
        """Load the values saved for this bucket's parameters; fields that were not saved keep theirs."""
        unpacked = {name: packed.read() for name, packed in self.packed.items()}
        per_element = self.flat | unpacked
        for tensor, place in self.bucket.segments():
            for name, value in saved.get(tensor.owner, {}).items():
                if name in per_element:
                    part = value.reshape(-1)[tensor.start : tensor.start + tensor.numel]
                    assert part.numel() == tensor.numel, f"{name} of {tensor.name} has another size"
                    per_element[name][place].copy_(part)
                elif name in self.whole:
                    self.whole[name][tensor.name] = value.detach().to(self.bucket.device, copy=True)
        for name, values in unpacked.items():
            self.packed[name].write(values)
        for part in self.parts:
            part.restore(saved)


def _multiply(value: torch.Tensor, ratio: torch.Tensor | float) -> None:
    # A ratio on a GPU stays there: reading it would make the host wait.
    value.mul_(ratio.to(value.device) if isinstance(ratio, torch.Tensor) else ratio)
