"""A gradient that is still in flight: an operation that uses it waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only


class LazyGradient(torch.Tensor):
    """Stands for a view of an exchange buffer; every operation on it first waits until the mean has arrived.

    So clipping, unscaling and logging of gradients stay correct under schedules that do not wait at the end of the
    backward pass; they only cost the wait.
    """

    _view: torch.Tensor
    _wait: Callable[[], None]
    _is_there: Callable[[], bool]

    @staticmethod
    def __new__(
        cls, view: torch.Tensor, wait: Callable[[], None], is_there: Callable[[], bool] = lambda: False
    ) -> LazyGradient:
        """A tensor that looks like `view`."""
        lazy = torch.Tensor._make_wrapper_subclass(
            cls,
            view.shape,
            strides=view.stride(),
            storage_offset=view.storage_offset(),
            dtype=view.dtype,
            device=view.device,
            requires_grad=False,
        )
        lazy._view = view
        lazy._wait = wait
        lazy._is_there = is_there
        return lazy

    def arrived(self) -> torch.Tensor:
        """The real gradient; waits for it."""
        self._wait()
        return self._view

    def without_waiting(self) -> torch.Tensor | None:
        """The real gradient if it has arrived."""
        return self._view if self._is_there() else None

    def __repr__(self) -> str:  # pyrefly: ignore[bad-override] - as of the tensor it stands for
        return repr(self.arrived())

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override] - torch declares it without `func`
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation on the real gradients."""
        real_args = tree_map_only(LazyGradient, LazyGradient.arrived, args)
        real_kwargs = tree_map_only(LazyGradient, LazyGradient.arrived, kwargs or {})
        return func(*real_args, **real_kwargs)
