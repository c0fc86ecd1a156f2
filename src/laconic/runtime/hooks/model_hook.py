"""A hook on the attached model that runs before its forward pass and belongs to no copy of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class ModelHook:
    """Calls `act` with the module that is about to run.

    Copying or saving an attached model must not take the session along: there, nothing stands in its place.
    """

    def __init__(self, act: Callable[[nn.Module], None]) -> None:
        self._act = act

    def __call__(self, module: nn.Module, inputs: object) -> None:
        """Pass the call on."""
        self._act(module)

    def __deepcopy__(self, memo: dict[int, object]) -> NoHook:
        return NoHook()

    def __reduce__(self) -> tuple[type[NoHook], tuple[()]]:
        return NoHook, ()


class NoHook:
    """What stands in a copy of the model where the hook was."""

    def __call__(self, module: nn.Module, inputs: object) -> None:
        """Do nothing."""


def before_forward(model: nn.Module, act: Callable[[nn.Module], None], *, first: bool = False) -> RemovableHandle:
    """Call `act` before each forward pass of `model`, before all other hooks if `first`."""
    hook: Callable[[nn.Module, object], None] = ModelHook(act)
    if getattr(model, "_compiled_call_impl", None) is not None:
        hook = torch.compiler.disable(hook)  # model.compile(): hooks are compiled with the model
    return model.register_forward_pre_hook(hook, prepend=first)
