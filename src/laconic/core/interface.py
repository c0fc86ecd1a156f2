"""The address of this host that the job uses: by the interface named for Gloo or NCCL, or the route to the master."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping

from laconic.errors import AttachError, one_line

_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915
_ANY_PORT = 9
"""Connecting a datagram socket sends nothing, so the port does not matter."""


def local_address(peer_host: str | None = None, *, environment: Mapping[str, str] | None = None) -> str:
    """The IPv4 address on which this host's listeners belong.

    The interface named by GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME decides; without one, the route to `peer_host`,
    which is MASTER_ADDR unless given; without that, 127.0.0.1. A host name that a host's own table maps to 127.0.1.1
    gives a loopback address there; name the interface then.
    """
    environment = os.environ if environment is None else environment
    for variable in _VARIABLES:
        wanted = environment.get(variable, "").split(",")[0].strip()
        if wanted and not wanted.startswith("^"):  # an exclusion does not determine an interface
            return _address_of(_interface(wanted, variable), variable)
    peer_host = peer_host or environment.get("MASTER_ADDR")
    return _address_towards(peer_host) if peer_host else "127.0.0.1"


def _interface(wanted: str, variable: str) -> str:
    """The interface with exactly this name, else the first whose name begins with it, as in NCCL."""
    exact = wanted.removeprefix("=")
    names = [name for _, name in socket.if_nameindex()]
    matches = [name for name in names if name == exact or (exact == wanted and name.startswith(exact))]
    if not matches:
        raise AttachError(
            f'the environment variable {variable} names interface "{wanted}", but this host has {", ".join(names)}.'
        )
    return exact if exact in matches else matches[0]


def _address_of(interface: str, variable: str) -> str:
    request = struct.pack("256s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock, _SIOCGIFADDR, request)
        except OSError as exc:
            raise AttachError(
                f"interface {interface}, named by the environment variable {variable}, has no IPv4 address: "
                f"{one_line(exc)}."
            ) from exc
    # struct ifreq: 16 bytes of name, then a sockaddr_in whose address follows two bytes of family and two of port.
    return socket.inet_ntoa(answer[20:24])


def _address_towards(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((host, _ANY_PORT))
        except (OSError, UnicodeError) as exc:  # names that cannot be looked up raise the latter
            raise AttachError(
                f'no route to the master host "{host}" over IPv4: {one_line(exc)}. Set {_VARIABLES[0]} to the '
                "interface the job uses."
            ) from exc
        return str(sock.getsockname()[0])
