"""The lines that stand above every page of results: the command, the machine in words, the date."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

import torch

from laconic.lab.machine import machine

_ARCHITECTURES = {"x86_64": "x86", "aarch64": "Arm", "arm64": "Arm"}


def machine_in_words() -> str:
    """Where this runs, without names: "a virtual machine with 2 x86 cores, torch 2.13.0"."""
    found = machine()
    flags = Path("/proc/cpuinfo")
    virtual = flags.exists() and "hypervisor" in flags.read_text(encoding="utf-8", errors="replace")
    kind = _ARCHITECTURES.get(found.architecture, found.architecture)
    version = torch.__version__.partition("+")[0]
    return f"a {'virtual ' if virtual else ''}machine with {found.usable_cores} {kind} cores, torch {version}"


def command_line(module: str) -> str:
    """What was typed, with paths as they were given."""
    return shlex.join(["python", "-m", f"benchmarks.{module}", *sys.argv[1:]])


def page_head(title: str, module: str) -> list[str]:
    """Title, command, machine and date, as Markdown."""
    return [
        f"# {title}",
        "",
        f"`{command_line(module)}`, {time.strftime('%Y-%m-%d')}, on {machine_in_words()}.",
        "",
    ]
