"""The hook on one parameter, called by autograd once its gradient has been accumulated."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from laconic.runtime.shards import is_sharded


class TakesGradients(Protocol):
    """The receiver of the hook's calls."""

    def gradient_ready(self, name: str, parameter: torch.Tensor, *, others_follow: bool) -> None:
        """The gradient of this parameter is accumulated; others_follow: hooks of the user will still run on it."""


class ParameterHook:
    """The hook on one parameter; a class, so that an attached parameter can be recognised.

    Hooks of the user may change a gradient, so this hook is kept last.
    """

    __slots__ = ("_hooks", "_key", "_name")

    def __init__(self, hooks: TakesGradients, name: str) -> None:
        self._hooks = hooks
        self._name = name
        self._key = -1

    def put_on(self, parameter: nn.Parameter) -> RemovableHandle:
        """Register this hook after the existing ones."""
        handle = parameter.register_post_accumulate_grad_hook(self)
        self._key = handle.id
        return handle

    def __call__(self, parameter: torch.Tensor) -> None:
        """Pass the gradient on."""
        hooks: dict[int, object] = parameter._post_accumulate_grad_hooks  # pyrefly: ignore[missing-attribute]
        last = next(reversed(hooks)) == self._key
        # FSDP calls them itself, one after the other, and the order must not change meanwhile.
        if not last and not is_sharded(parameter):
            hooks[self._key] = hooks.pop(self._key)
        self._hooks.gradient_ready(self._name, parameter, others_follow=not last)


class Mark:
    """A hook that does nothing, where a strategy takes no gradients: it shows that the parameter is attached."""

    __slots__ = ()

    def __call__(self, parameter: torch.Tensor) -> None:
        """Do nothing."""


def is_attached(parameter: nn.Parameter) -> bool:
    """Whether a session has its hook on this parameter."""
    hooks: dict[int, Any] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(isinstance(hook, ParameterHook | Mark) for hook in hooks.values())
