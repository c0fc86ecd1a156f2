"""Facts about the user's optimizer that a method may need before it is attached."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from laconic.errors import AttachError, warn_user


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """One optimizer, or several that share a model, in a few numbers."""

    name: str
    """The name of its class; several are joined by "and"."""
    momentum: float = 0.0
    """The largest `momentum` of its parameter groups, as SGD, RMSprop and Muon have it."""
    nesterov: bool = False
    """Some parameter group uses Nesterov momentum."""
    first_beta: float = 0.0
    """The largest betas[0] of its parameter groups: the decay of the average that Adam and its variants step along."""
    divides: bool = False
    """Some parameter group has an `eps`, like those of optimizers that divide by the size of gradients: Adam, RMSprop,
    Adagrad, Muon."""

    @classmethod
    def of(cls, *optimizers: Optimizer) -> OptimizerFacts:
        """The facts from the current parameter groups of these optimizers."""
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        return cls(
            name=" and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers)),
            momentum=max(_numbers(group.get("momentum") for group in groups), default=0.0),
            nesterov=any(bool(group.get("nesterov")) for group in groups),
            first_beta=max(_numbers(_first(group.get("betas")) for group in groups), default=0.0),
            divides=any("eps" in group for group in groups),
        )

    def check_adam(self, owner: str) -> None:
        """Raise AttachError unless the optimizer averages gradients as Adam does."""
        if not self.first_beta:
            raise AttachError(
                f"{owner} exchanges the momentum of Adam, and {self.name} has none (no betas, or betas[0]=0). Train "
                'with torch.optim.AdamW, or exchange gradients: "bsp / all_reduce / int8".'
            )

    def check_no_momentum(self, owner: str, instead: str) -> None:
        """Raise AttachError if the optimizer adds a second momentum to the one that `owner` keeps.

        instead: what to write to keep the optimizer's momentum. Adam and its variants average gradients too, but divide
        by their size afterwards, so there a second momentum is only doubtful: a warning says so.
        """
        if self.momentum:
            without = "momentum=0, nesterov=False" if self.nesterov else "momentum=0"
            raise AttachError(
                f"{owner} keeps momentum itself, and {self.name} has momentum={self.momentum:g}: momentum would "
                f"be applied twice. Write {self.name}(..., {without}), or {instead}."
            )
        if self.first_beta:
            warn_user(
                f"{owner} keeps momentum itself, and {self.name} averages gradients over steps as well "
                f"(betas[0]={self.first_beta:g}). {owner} is made for SGD without momentum: use that, or betas=(0, "
                f"...), or {instead}."
            )

    def check_applies_directions(self, owner: str, instead: str) -> None:
        """Raise AttachError if the optimizer does not move parameters straight along the directions of `owner`.

        instead: what to write to keep the optimizer.
        """
        if self.divides and not self.momentum:
            raise AttachError(
                f"{owner} computes a normalized direction for each step, and {self.name} would normalize it once more "
                f"(it has an eps). Use torch.optim.SGD without momentum, or {instead}."
            )
        self.check_no_momentum(owner, instead)


def _numbers(values: Iterator[object]) -> list[float]:
    """The values that are numbers: other optimizers may hold anything under the same name."""
    return [float(value) for value in values if isinstance(value, int | float | torch.Tensor)]


def _first(betas: object) -> object:
    return betas[0] if isinstance(betas, tuple | list) and betas else None
