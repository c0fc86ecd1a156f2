"""The memory of a plan: contiguous tensors, buckets as ranges of them, a view per parameter, a state per bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from laconic.core.plan import Plan
from laconic.core.stateful import CARRIED, BucketState, ParameterState
from laconic.core.tensor import memory_order
from laconic.strategy import Strategy


class Buckets:
    """Flat tensors, views and state for every bucket of one plan.

    parameters: only their shapes and strides count, as they are now: state that has been written keeps its order if a
    parameter gets another memory format later.
    """

    def __init__(
        self,
        plan: Plan,
        strategy: Strategy,
        parameters: Mapping[str, torch.Tensor],
        saved: ParameterState,
        flats: list[torch.Tensor] | None = None,
    ) -> None:
        self.plan = plan
        self._parameters = parameters = layouts_of(parameters)
        self._scaled_fields = strategy.scaled_fields() | {CARRIED}
        self.views: dict[str, torch.Tensor] = {}
        self.flats = flats if flats is not None else self._lay_out()
        self.states: list[BucketState] = []
        self.buckets_of: dict[str, list[int]] = {}
        """The buckets that each parameter is exchanged in: one, or one per piece."""
        for index, bucket in enumerate(plan.buckets):
            state = strategy.init(bucket)
            if any(CARRIED in saved.get(tensor.owner, {}) for tensor in bucket.tensors):
                state.flat[CARRIED] = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
            state.restore(saved)
            self.states.append(state)
            for tensor, place in bucket.segments():
                if flats is not None:
                    self.views[tensor.name] = _view_like(parameters[tensor.name], flats[index][place])
                self.buckets_of.setdefault(tensor.owner, []).append(index)

    def _lay_out(self) -> list[torch.Tensor]:
        """One contiguous tensor per dtype and device, with a view per parameter and a view per bucket."""
        tensors = {tensor.owner: tensor for bucket in self.plan.buckets for tensor in bucket.tensors}
        kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name in self.plan.layout or tensors:
            kinds.setdefault((tensors[name].dtype, tensors[name].device), []).append(name)
        places: dict[str, tuple[torch.Tensor, int]] = {}
        for (dtype, device), names in kinds.items():
            sizes = [self._parameters[name].numel() for name in names]
            memory, begin = torch.empty(sum(sizes), dtype=dtype, device=device), 0
            for name, numel in zip(names, sizes, strict=True):
                places[name] = (memory, begin)
                self.views[name] = _view_like(self._parameters[name], memory[begin : begin + numel])
                begin += numel
        flats: list[torch.Tensor] = []
        for bucket in self.plan.buckets:
            first = bucket.tensors[0]
            memory, begin = places[first.owner]
            flats.append(memory[begin + first.start : begin + first.start + bucket.numel])
            for tensor, place in bucket.segments():
                here = places[tensor.owner][1] + tensor.start
                assert here == begin + first.start + place.start, f"{tensor.name} does not follow its neighbour"
        return flats

    def state_by_parameter(self) -> ParameterState:
        """State of all buckets, keyed by parameter name; the state of pieces is joined."""
        return whole_state(self.states, self._parameters)

    def write(self, field: str, values: Mapping[str, torch.Tensor]) -> None:
        """Overwrite a field of state with values of each parameter's shape; parameters left out keep theirs."""
        for index, state in enumerate(self.states):
            for name, view in self.views_of(index, state.flat[field]).items():
                if name in values:
                    view.copy_(values[name])

    def rescale(self, ratio: torch.Tensor | float) -> None:
        """Multiply state in units of gradients by `ratio`: a GradScaler's new scale / its old one."""
        for state in self.states:
            state.rescale(ratio, self._scaled_fields)

    def views_of(self, index: int, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of another flat tensor of the size of bucket `index`, one per parameter."""
        segments = self.plan.buckets[index].segments()
        return {tensor.name: _view_like(self._parameters[tensor.name], flat[place]) for tensor, place in segments}


def whole_state(states: Sequence[BucketState], parameters: Mapping[str, torch.Tensor]) -> ParameterState:
    """States of several buckets, keyed by parameter name; the state of pieces is joined."""
    merged: ParameterState = {}
    for state in states:
        for name, fields in state.by_parameter().items():
            merged.setdefault(name, {}).update(fields)
    pieces = {tensor.name: tensor for state in states for tensor in state.bucket.tensors if tensor.part_of}
    for name in [name for name in merged if name in pieces]:
        piece = pieces[name]
        for field, value in merged.pop(name).items():
            like = parameters[piece.owner]
            whole = merged.setdefault(piece.owner, {}).setdefault(field, value.new_zeros(like.shape))
            whole.view(-1)[piece.start : piece.start + piece.numel] = value.view(-1)
    return merged


def layouts_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors without values that have the shapes and strides that these have now."""
    return {
        name: tensor
        if tensor.is_meta
        else torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        for name, tensor in tensors.items()
    }


def _view_like(parameter: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """A view of `flat` with the parameter's shape and, where it is dense, its strides (channels_last stays so)."""
    if memory_order(parameter) is not None:
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
    return flat.view(parameter.shape)
