"""Moves gradients between .grad and buckets: they are copied in scaled by 1/n, and .grad becomes a view of the mean.

Gradients belong to the user. Each .grad is a new tensor, so that code that re-points it (p.grad.data = ...,
model.double()) never re-points our view, and the address of a gradient is checked before it is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from laconic.runtime.buckets import Buckets, layouts_of
from laconic.runtime.hooks.lazy_gradient import LazyGradient
from laconic.runtime.shards import Pieces, as_piece_of, local

_TOGETHER_ON = ("cuda",)
"""Devices where the gradients of a bucket are copied in one launch."""


class GradientViews:
    """Moves gradients into their buckets, and lets .grad be a view of them."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], scale: float) -> None:
        self._parameters = parameters
        self._values = Pieces(parameters)
        self.scale = scale
        self.layouts: Mapping[str, torch.Tensor] = layouts_of(self._values)
        """Parameters as they were when attached: buckets keep that layout on all ranks, even if the parameters
        change."""
        self._views: dict[str, torch.Tensor] = {}
        self._storages: dict[str, int] = {}
        self._uncopied: dict[str, torch.Tensor] = {}
        self._handed_out: dict[str, torch.Tensor] = {}
        self._relaid: list[str] = []

    def use(self, buckets: Buckets) -> None:
        """Use these buckets from now on."""
        self._views = buckets.views
        self._storages = {name: view.untyped_storage().data_ptr() for name, view in self._views.items()}

    def clear(self) -> None:
        """A pass begins."""
        self._uncopied.clear()
        self._handed_out.clear()
        self._relaid.clear()

    # -- into the bucket ---------------------------------------------------------------------------------------------

    def fill(self, name: str, gradient: torch.Tensor | None) -> None:
        """Copy a scaled gradient into its bucket, at the latest when `flush` is called."""
        view = self._views[name]
        if gradient is None:
            view.zero_()
        elif self.lies_in_a_bucket(name, gradient):
            if gradient.data_ptr() == view.data_ptr() and gradient.stride() == view.stride():
                view.mul_(self.scale)
            else:  # e.g. transposed by the user, so source and target overlap
                view.copy_(gradient * self.scale)
        elif view.device.type in _TOGETHER_ON:
            self._uncopied[name] = gradient
        else:
            torch.mul(gradient, self.scale, out=view)

    def flush(self, names: list[str]) -> None:
        """Make sure that the gradients of these parameters are in their buckets."""
        waiting = [name for name in names if name in self._uncopied] if self._uncopied else []
        if waiting:
            views = [self._views[name] for name in waiting]
            torch._foreach_copy_(views, [self._uncopied.pop(name) for name in waiting])
            torch._foreach_mul_(views, self.scale)

    def lies_in_a_bucket(self, name: str, gradient: torch.Tensor) -> bool:
        """Whether the gradient lies in the memory of our buckets."""
        if gradient.layout != torch.strided:
            return False
        place = gradient.untyped_storage().data_ptr()
        return place != 0 and place == self._storages[name]

    # -- and out -----------------------------------------------------------------------------------------------------

    def hand_out(self, name: str) -> None:
        """Make .grad a view of the mean, which may still be in flight."""
        if name in self._handed_out:
            return
        if self.is_relaid(name):
            # Optimizers expect the parameter's memory format: .grad becomes a copy when the mean has arrived.
            self._relaid.append(name)
            return
        # The view itself stays ours: `p.grad.data = ...` would re-point it.
        self._give(name, self._views[name].detach())

    def give_back(self, name: str, gradient: torch.Tensor) -> None:
        """Restore .grad from before the pass."""
        self._give(name, gradient)

    def copy_out(self) -> None:
        """The means have arrived: copy those that cannot be views."""
        for name in self._relaid:
            self._give(name, torch.empty_like(self._values[name]).copy_(self._views[name]))
        self._relaid.clear()

    def _give(self, name: str, gradient: torch.Tensor) -> None:
        parameter = self._parameters[name]
        parameter.grad = whole = as_piece_of(parameter, gradient)
        self._handed_out[name] = local(whole)

    def is_relaid(self, name: str) -> bool:
        """Whether the parameter has changed its memory format since it was attached."""
        return self._values[name].stride() != self.layouts[name].stride()

    def was_handed_out(self, name: str, gradient: torch.Tensor) -> bool:
        """Whether this gradient is one of our views or copies, so that it has been exchanged."""
        return gradient is self._handed_out.get(name) or self.lies_in_a_bucket(name, gradient)

    def first_result(self, names: Iterable[str]) -> str | None:
        """The first of these parameters whose .grad still holds what was handed out; None if all were set to zero."""
        held: dict[str, torch.Tensor] = {}
        for name in names:
            gradient = self._parameters[name].grad
            whole = gradient.arrived() if isinstance(gradient, LazyGradient) else gradient
            if whole is not None and (whole is not gradient or self.was_handed_out(name, local(whole))):
                held[name] = local(whole)
        held = {name: gradient for name, gradient in held.items() if gradient.numel()}
        # Together, so that the host waits once for a GPU.
        sizes = torch._foreach_norm([*held.values()], ord=torch.inf) if held else []
        largest = torch.stack([size.float().to(sizes[0].device) for size in sizes]).tolist() if held else []
        return next((name for name, size in zip(held, largest, strict=True) if size), None)

    def release(self) -> None:
        """Replace gradients that share memory with a bucket by ordinary tensors."""
        for parameter in self._parameters.values():
            gradient = parameter.grad
            if gradient is None or gradient.layout != torch.strided:
                continue
            piece = local(gradient)
            if piece.untyped_storage().nbytes() != piece.nbytes:
                parameter.grad = gradient.clone()
        self.clear()
