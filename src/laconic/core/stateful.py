"""State that can be seen, saved and put back."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

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
"""What becomes of a field when the number of workers changes.

sum: the ranks' values add up to what counts; those of a rank that goes away are added to a survivor's, and a new rank
starts from zero. copy: all ranks hold the same, and so do new ones. reset: it starts anew.
"""


@dataclass
class BucketState:
    """What a compressor remembers about one bucket between steps.

    `flat` fields hold one value per element of the bucket and can be cut by parameter; `whole` fields belong to one
    parameter each (field -> parameter name -> tensor). Field names start with the name of the method that owns them.
    """

    bucket: Bucket
    flat: dict[str, torch.Tensor] = field(default_factory=dict)
    whole: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    parts: list[BucketState] = field(default_factory=list)
    """States of other buckets that together hold this one's tensors, for a method that treats tensors differently."""
    moment: Moment = field(default_factory=Moment)
    """The exchange that is about to take place; set by whoever runs it, never saved."""
    owed: torch.Tensor | None = None
    """Per element, what was lost when sums were sent back by this rank and is to be added to the next ones; None: it is
    forgotten. Set by whoever remembers it, around an exchange; never saved from here."""
    tables: dict[Hashable, Any] = field(default_factory=dict)
    """What follows from the bucket alone and is kept to save time; never saved."""
    measure: bool = False
    """Whether somebody wants to know `metrics` of the exchange that is about to take place."""
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    """What was measured in the last exchange that asked for it: scalars, still on the bucket's device."""

    def per_element(self) -> frozenset[str]:
        """Names of the fields that hold one value per element."""
        return frozenset(self.flat).union(*(part.per_element() for part in self.parts))

    def part(self, index: int) -> BucketState:
        """One of the parts, made ready for the exchange this state is ready for."""
        part = self.parts[index]
        part.moment, part.measure, part.metrics = self.moment, self.measure, self.metrics
        return part

    def rescale(self, ratio: torch.Tensor | float, fields: Collection[str]) -> None:
        """Multiply the values of these fields by `ratio`, here and in the parts."""
        for name in self.flat.keys() & set(fields):
            _multiply(self.flat[name], ratio)
        for name in self.whole.keys() & set(fields):
            for value in self.whole[name].values():
                _multiply(value, ratio)
        for part in self.parts:
            part.rescale(ratio, fields)

    def by_parameter(self) -> ParameterState:
        """The same state keyed by parameter name, independent of how tensors were grouped."""
        saved: ParameterState = {}
        for tensor, place in self.bucket.segments():
            fields = {name: flat[place].reshape(tensor.shape) for name, flat in self.flat.items()}
            fields |= {name: values[tensor.name] for name, values in self.whole.items() if tensor.name in values}
            if fields:
                saved[tensor.name] = fields
        for part in self.parts:
            for name, fields in part.by_parameter().items():
                saved.setdefault(name, {}).update(fields)
        return saved

    def restore(self, saved: ParameterState) -> None:
        """Take over the values saved for this bucket's parameters; fields that were not saved keep theirs."""
        for tensor, place in self.bucket.segments():
            for name, value in saved.get(tensor.owner, {}).items():
                if name in self.flat:
                    part = value.reshape(-1)[tensor.start : tensor.start + tensor.numel]
                    assert part.numel() == tensor.numel, f"{name} of {tensor.name} has another size"
                    self.flat[name][place].copy_(part)
                elif name in self.whole:
                    self.whole[name][tensor.name] = value.detach().to(self.bucket.device, copy=True)
        for part in self.parts:
            part.restore(saved)


def _multiply(value: torch.Tensor, ratio: torch.Tensor | float) -> None:
    # A ratio on a GPU stays there: reading it would make the host wait.
    value.mul_(ratio.to(value.device) if isinstance(ratio, torch.Tensor) else ratio)
