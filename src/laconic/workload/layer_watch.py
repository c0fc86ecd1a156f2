"""Hooks that record when each layer of a model computes, in both passes, and when gradients are complete.

A layer is a module without children or with parameters of its own. In the forward pass its time lasts from its call to
the next layer's, so that functions between two modules belong to the module before them. Every node of autograd's graph
belongs to the layer in whose time it was made, and in the backward pass a layer begins when autograd reaches one of its
nodes, so functions belong to the same layer in both passes. Nodes are hooked, not modules or tensors, because modules
that work in place could not be hooked otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import TracebackType
from typing import Literal

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from laconic.workload.device_time import Mark

WHOLE_MODEL = "(model)"
"""The name of the model itself where it is a layer, or where no module in it is one; no module has this name."""


@dataclass(frozen=True)
class Sight:
    """An event in a pass: a layer begins to compute, or a gradient is complete."""

    kind: Literal["layer", "ready"]
    name: str
    """Of the layer that begins to compute, or of the parameter whose gradient is complete."""
    mark: Mark


class LayerWatch:
    """Records one step inside a `with` block; afterwards all hooks are removed.

    with LayerWatch(model, mark) as watch:
        loss = ...
        watch.turn(loss)
        loss.backward()
    """

    def __init__(self, model: nn.Module, mark: Callable[[], Mark]) -> None:
        self._model = model
        self._mark = mark
        self.forward: list[Sight] = []
        """Layers, in the order in which they were called."""
        self.backward: list[Sight] = []
        """Layers and gradients, in the order in which autograd reached them."""
        self._sights = self.forward
        self._seen = ""
        self._layer: str | None = None
        self._inside: list[str] = []
        self._made: list[tuple[list[Node], str]] = []
        # Kept during the step: a node without a reference returns as another object.
        self._nodes: dict[Node, RemovableHandle] = {}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> LayerWatch:
        for name, module in self._model.named_modules():
            if is_layer(module):
                before, after = self._hooks(name or WHOLE_MODEL)
                self._handles += [
                    module.register_forward_pre_hook(before, with_kwargs=True),
                    # Also where the call is cut short, as checkpointing does once it has recomputed what it needs.
                    module.register_forward_hook(after, always_call=True),
                ]
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._ready(name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A hook on a node and the list of nodes here would keep each other alive.
        for handle in (*self._nodes.values(), *self._handles):
            handle.remove()
        self._nodes.clear()
        self._made.clear()
        self._handles.clear()

    def turn(self, loss: torch.Tensor) -> None:
        """Mark the end of the forward pass; the backward pass begins with the last layer's functions."""
        last = self._layer or WHOLE_MODEL
        if not self.forward:
            self._see(last)
        self._was_made(loss, last)
        for nodes, layer in self._made:
            self._claim(nodes, layer)
        self._sights, self._seen = self.backward, ""
        self._see(last)

    def _see(self, layer: str) -> None:
        if layer != self._seen:
            self._sights.append(Sight("layer", layer, self._mark()))
            self._seen = layer

    def _was_made(self, values: object, layer: str) -> None:
        """These values are the results that `layer` has computed since the last call."""
        nodes = [tensor.grad_fn for tensor in tensors_in(values) if tensor.grad_fn is not None]
        if self._sights is self.forward:
            self._made.append((nodes, layer))  # the rest can wait until the pass is over
        else:
            self._claim(nodes, layer)  # recomputed by checkpointing, and about to be used

    def _claim(self, nodes: list[Node], layer: str) -> None:
        """Assign these nodes, and all their unclaimed inputs, to `layer`."""
        found = list(nodes)
        while found:
            node = found.pop()
            if node not in self._nodes and not node.name().endswith("AccumulateGrad"):
                self._nodes[node] = node.register_prehook(lambda gradients: self._see(layer))
                found += [before for before, _ in node.next_functions if before is not None]

    def _hooks(
        self, layer: str
    ) -> tuple[
        Callable[[nn.Module, tuple[object, ...], dict[str, object]], None],
        Callable[[nn.Module, tuple[object, ...], object], None],
    ]:
        def before(module: nn.Module, arguments: tuple[object, ...], named: dict[str, object]) -> None:
            self._was_made((arguments, named), self._layer or layer)
            self._inside.append(layer)
            self._layer = layer
            self._see(layer)

        def after(module: nn.Module, arguments: tuple[object, ...], outputs: object) -> None:
            self._was_made(outputs, layer)
            self._inside.pop()
            if self._inside:
                # The enclosing layer's own work counts as its time again.
                self._layer = self._inside[-1]
                self._see(self._layer)

        return before, after

    def _ready(self, name: str) -> Callable[[torch.Tensor], None]:
        return lambda parameter: self._sights.append(Sight("ready", name, self._mark()))


def is_layer(module: nn.Module) -> bool:
    """Whether a module is timed by itself."""
    has_children = next(module.children(), None) is not None
    return not has_children or next(module.parameters(recurse=False), None) is not None


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """All tensors in nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
