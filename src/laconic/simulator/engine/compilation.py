"""How the inner loops are compiled: by numba where it can be used, else not at all, which gives the same numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import ParamSpec, TypeVar

from laconic.errors import LaconicWarning, one_line

_P = ParamSpec("_P")
_R = TypeVar("_R")


def compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function`, compiled when it is first called and kept on disk.

    For modules that are imported only when something runs. What a kept function calls in other files is kept with it:
    after a change there, save the file of the caller too.
    """
    numba = _numba()
    return function if numba is None else numba.njit(cache=True, nogil=True, error_model="numpy")(function)


def compiled_part(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The same for a function that only compiled ones call: it takes half as long to compile."""
    numba = _numba()
    if numba is None:
        return function
    return numba.njit(cache=True, nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(
        function
    )


@cache
def _numba() -> ModuleType | None:
    found: ModuleType | None = None
    reason = "numba is not installed"
    if find_spec("numba") is not None:
        try:
            found = import_module("numba")
        except (ImportError, RuntimeError) as exc:  # another numpy than it was made for
            reason = f"numba is installed but cannot be used ({one_line(exc)})"
    if found is None:
        warnings.warn(
            f"{reason}; simulations run in plain Python, about a hundred times slower. Install or repair numba.",
            LaconicWarning,
            stacklevel=2,
        )
    return found
