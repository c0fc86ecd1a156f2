"""Chooses the kernels of a device: the only module that imports those in numba and Triton, and warns if that fails."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from laconic.errors import one_line

_ROOM = "laconic.compression.kernels"
_FASTER = {"cpu": ("numba_cpu", "numba"), "cuda": ("triton_gpu", "triton")}
"""device type -> the folder with its kernels, and the package that must be installed for them"""


@cache
def load_kernels(family: str, device_type: str, *, reference: bool = False) -> ModuleType:
    """The module that holds a family of kernels for this kind of device, imported when first asked for.

    It is the reference if that is requested, or if there is nothing faster here.
    """
    faster = None if reference else load_faster(family, device_type)
    return faster or import_module(f"{_ROOM}.reference.{family}")


def has_faster(family: str, device_type: str) -> bool:
    """Whether this kind of device has faster kernels than the reference, here and now."""
    return load_kernels(family, device_type) is not load_kernels(family, device_type, reference=True)


@cache
def load_faster(family: str, device_type: str) -> ModuleType | None:
    """The kernels of a family that were written for this kind of device; None: there are none, or not here."""
    folder, package = _FASTER.get(device_type, ("", ""))
    if not package or find_spec(package) is None or find_spec(f"{_ROOM}.{folder}.{family}") is None:
        return None
    try:
        return import_module(f"{_ROOM}.{folder}.{family}")
    except (ImportError, RuntimeError) as exc:  # built for another numpy; no place for compiled code
        _warn(package, one_line(exc))
        return None


@cache  # once for each reason, not once for each family
def _warn(package: str, reason: str) -> None:
    warnings.warn(
        f"{package} is installed but cannot be used ({reason}); compression runs in plain torch, which is slower. "
        f"Repair or uninstall {package}.",
        stacklevel=4,
    )
