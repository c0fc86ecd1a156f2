"""Compiles the inner loops with numba where it is available; plain Python gives the same numbers."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import ParamSpec, TypeVar

from laconic.errors import LaconicWarning, one_line

_P = ParamSpec("_P")
_R = TypeVar("_R")


def compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile `function` when it is first called, and cache it on disk. For modules imported only when a graph runs."""
    numba = _numba()
    if numba is None:
        return function
    # numba caches compiled code under this name, together with all that it calls, but checks only the file of the
    # function itself when it loads the cache.
    function.__qualname__ = f"{function.__qualname__}_{_fingerprint()}"
    try:
        return numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # no place for a cache
        return numba.njit(nogil=True, error_model="numpy")(function)


def compiled_part(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile `function` and cache it with its callers, which must be compiled too."""
    numba = _numba()
    if numba is None:
        return function
    return numba.njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)


@cache
def _fingerprint() -> str:
    """A hash of all sources that a cached function may depend on."""
    digest = hashlib.blake2b(digest_size=6)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


@cache
def _numba() -> ModuleType | None:
    found: ModuleType | None = None
    reason = "numba is not installed"
    if find_spec("numba") is not None:
        try:
            found = import_module("numba")
        except (ImportError, RuntimeError) as exc:  # built for another numpy
            reason = f"numba is installed but cannot be used ({one_line(exc)})"
    if found is None:
        warnings.warn(
            f"{reason}; simulations run in plain Python, about a hundred times slower. Install or repair numba.",
            LaconicWarning,
            stacklevel=2,
        )
    return found
