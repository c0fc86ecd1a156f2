"""The memory behind a plan: one flat tensor per bucket, one view of it per parameter, one state per bucket."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from laconic.core.plan import Plan
from laconic.core.stateful import BucketState, ParameterState
from laconic.strategy import Strategy


class Buckets:
    """Flat tensors, views and state for every bucket of one plan."""

    def __init__(
        self,
        plan: Plan,
        strategy: Strategy,
        parameters: Mapping[str, nn.Parameter],
        saved: ParameterState,
        flats: list[torch.Tensor] | None = None,
    ) -> None:
        self.plan = plan
        self._parameters = parameters
        self.flats = flats or [torch.empty(b.numel, dtype=b.dtype, device=b.device) for b in plan.buckets]
        self.states: list[BucketState] = []
        self.views: dict[str, torch.Tensor] = {}
        self.bucket_of: dict[str, int] = {}
        self._first_elements: list[torch.Tensor] = []
        for index, bucket in enumerate(plan.buckets):
            state = strategy.init(bucket)
            state.restore(saved)
            self.states.append(state)
            starts: list[int] = []
            for tensor, place in bucket.segments():
                self.views[tensor.name] = _view_like(parameters[tensor.name], self.flats[index][place])
                self.bucket_of[tensor.name] = index
                if tensor.numel:
                    starts.append(place.start)
            self._first_elements.append(torch.tensor(starts, dtype=torch.long, device=bucket.device))

    def state_by_parameter(self) -> ParameterState:
        """State of all buckets, keyed by parameter name."""
        merged: ParameterState = {}
        for state in self.states:
            merged |= state.by_parameter()
        return merged

    def views_of(self, index: int, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Another flat tensor of the size of bucket `index` as its parameters see it."""
        segments = self.plan.buckets[index].segments()
        return {tensor.name: _view_like(self._parameters[tensor.name], flat[place]) for tensor, place in segments}

    def some_parameter_is_zero(self) -> bool:
        """Whether the exchanged values of some parameter are zero throughout.

        All ranks hold the same values after the exchange, so all come to the same answer without talking. Only the
        first element of each parameter is looked at unless that is zero.
        """
        for flat, starts in zip(self.flats, self._first_elements, strict=True):
            if bool((flat.index_select(0, starts) == 0).any()):
                return any(view.numel() and not bool(view.any()) for view in self.views.values())
        return False


def _view_like(parameter: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """A view of `flat` with the parameter's shape and, where it is dense, its strides (channels_last stays so)."""
    # A dense tensor's strides are a permutation of a contiguous tensor's: sorted by stride it is contiguous.
    order = sorted(
        range(parameter.dim()), key=lambda axis: (parameter.stride(axis), parameter.shape[axis]), reverse=True
    )
    if parameter.permute(order).is_contiguous():
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
    return flat.view(parameter.shape)
