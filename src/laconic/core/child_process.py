"""Code that a child process runs between fork and exec."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable

_DIE_WITH_PARENT = 1


def die_with_parent() -> Callable[[], None] | None:
    """A function that a child calls between fork and exec, to be killed when its parent dies; None where impossible."""
    if not sys.platform.startswith("linux"):
        return None
    # Looked up before the fork: the child must not need locks that another thread may hold.
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def enter() -> None:
        prctl(_DIE_WITH_PARENT, signal.SIGKILL)

    return enter
