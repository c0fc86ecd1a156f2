"""Modules that need numba, where it can be used."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from laconic.errors import one_line


@cache
def compiled(name: str) -> ModuleType | None:
    """The module of kernels/ with this name, imported when first asked for; None where numba cannot be used."""
    if find_spec("numba") is None:
        return None
    try:
        return import_module(f"laconic.compression.kernels.{name}")
    except (ImportError, RuntimeError) as exc:  # another numpy than it was made for; nowhere to keep compiled code
        warnings.warn(
            f"numba is installed but cannot be used ({one_line(exc)}); compression runs in plain torch, which is "
            "slower. Repair or uninstall numba.",
            stacklevel=2,
        )
        return None
