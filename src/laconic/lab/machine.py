"""Facts about this machine: versions, backends, GPUs, cores and memory.

Nothing here names the host, the user or a path, so the facts can be published.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

import laconic
from laconic.errors import one_line


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Cuda:
    """The GPUs as torch sees them."""

    built_for: str | None
    devices: tuple[Device, ...]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts about the operating system."""

    os: str
    kernel: str
    architecture: str
    cores: int
    usable_cores: int
    memory_bytes: int | None


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """The version of laconic, of Python, and of each package; None if it is absent."""
    found: dict[str, str | None] = {"laconic": laconic.__version__, "python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            # A copied folder can be imported without having been installed.
            found[package] = "(version unknown)" if importlib.util.find_spec(package) else None
    found["torch"] = str(torch.__version__)
    return found


def backends() -> dict[str, bool]:
    """Which backends torch.distributed has."""
    return {name: _ask(f"is_{name}_available") for name in ("gloo", "nccl", "mpi", "ucc")}


def _ask(question: str) -> bool:
    """Whether torch.distributed has a backend; a build without that part has no such function."""
    answer: Callable[[], bool] | None = getattr(torch.distributed, question, None)
    return bool(answer and answer())


def gpus() -> tuple[Cuda, str | None]:
    """The GPUs that torch can use, or why it cannot read them."""
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else None
    if torch.version.hip:
        built_for = f"ROCm {torch.version.hip}"
    devices: list[Device] = []
    try:
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                properties = torch.cuda.get_device_properties(index)
                devices.append(Device(name=properties.name, memory_bytes=properties.total_memory))
    except (RuntimeError, AssertionError, OSError) as exc:
        return Cuda(built_for=built_for, devices=()), one_line(exc)
    return Cuda(built_for=built_for, devices=tuple(devices)), None


def machine() -> Machine:
    """Facts about the operating system."""
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        memory = None
    try:
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        system = platform.system()
    return Machine(
        os=system,
        kernel=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        cores=cores,
        usable_cores=usable,
        memory_bytes=memory,
    )
