"""Modules that need numba or Triton, where those can be used."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from laconic.errors import one_line


@cache
def compiled(name: str) -> ModuleType | None:
    """The module of kernels/ with this name, imported when first asked for; None where it cannot be used.

    What it needs is the last part of its name: topk_numba, topk_triton.
    """
    package = name.rpartition("_")[2]
    if find_spec(package) is None:
        return None
    try:
        return import_module(f"laconic.compression.kernels.{name}")
    except (ImportError, RuntimeError) as exc:  # another numpy than it was made for; nowhere to keep compiled code
        warnings.warn(
            f"{package} is installed but cannot be used ({one_line(exc)}); compression runs in plain torch, which is "
            f"slower. Repair or uninstall {package}.",
            stacklevel=2,
        )
        return None
