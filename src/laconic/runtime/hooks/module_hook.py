"""A hook on a module that is not copied or saved with the module."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class ModuleHook:
    """Calls `action` with the module; in a copy of the module, or in a saved one, it does nothing.

    before_copy: called when the module is being copied; before_save: when it is being pickled, as torch.save does.
    """

    def __init__(
        self,
        action: Callable[[nn.Module], None] | None,
        *,
        before_copy: Callable[[], None] | None = None,
        before_save: Callable[[], None] | None = None,
    ) -> None:
        self._action = action
        self._before_copy = before_copy
        self._before_save = before_save

    def __call__(self, module: nn.Module, *_: object) -> None:
        """Pass the call on."""
        if self._action is not None:
            self._action(module)

    def __deepcopy__(self, memo: dict[int, object]) -> ModuleHook:
        if self._before_copy is not None:
            self._before_copy()
        return ModuleHook(None)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[None]]:
        if self._before_save is not None:
            self._before_save()
        return ModuleHook, (None,)


def before_forward(model: nn.Module, action: Callable[[nn.Module], None], *, first: bool = False) -> RemovableHandle:
    """Call `action` before each forward pass of `model`, before all other hooks if `first`."""
    return model.register_forward_pre_hook(ModuleHook(outside_compiled(model, action)), prepend=first)


def outside_compiled(model: nn.Module, action: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    """The action, excluded from torch.compile if the model was compiled in place."""
    return torch.compiler.disable(action) if getattr(model, "_compiled_call_impl", None) is not None else action
