"""The switch between the hosts of a job, where a process on it can take part: only in the lab.

The lab passes the address of its virtual switch to ranks in an environment variable. A process that a rank starts can
enter the switch's network namespace, because ranks of a lab have full access to the lab's network.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from laconic.errors import CommunicationError, one_line

SWITCH_VARIABLE = "LACONIC_SWITCH"
"""The environment variable with the address and the network namespace of the lab's switch, separated by a space."""
_NEW_NET = 0x40000000


@dataclass(frozen=True)
class Switch:
    """A switch that hosts reach at an address."""

    address: str
    namespace: str
    """The file of its network namespace."""

    def write(self) -> str:
        """The switch as the environment variable holds it."""
        return f"{self.address} {self.namespace}"


def switch_of_lab(environment: Mapping[str, str]) -> Switch | None:
    """The switch that the environment names; None: there is none, or not one that can be entered."""
    address, _, namespace = environment.get(SWITCH_VARIABLE, "").partition(" ")
    return Switch(address, namespace) if address and namespace else None


def enter_network(namespace: str) -> None:
    """Have this thread, and those that it starts, use another network namespace; raises CommunicationError."""
    try:
        entrance(namespace)()
    except OSError as exc:
        raise CommunicationError(f"a network of the lab cannot be entered: {one_line(exc)}.") from exc


def entrance(namespace: str) -> Callable[[], None]:
    """A function that enters a network namespace, also in a child process between fork and exec."""
    # Looked up before the fork: the child must not need locks that another thread may hold.
    libc = ctypes.CDLL(None, use_errno=True)

    def enter() -> None:
        file = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if libc.setns(file, _NEW_NET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        finally:
            os.close(file)

    return enter
