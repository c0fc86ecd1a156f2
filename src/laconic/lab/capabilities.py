"""The features for virtual hosts that this machine allows, tried out in a child process that leaves nothing behind.

The child enters a network namespace of its own (as root directly, otherwise inside a new user namespace), makes the
parts of a lab there, and exits; the kernel then removes the namespace with everything in it. The child runs this file
as a script, so it imports only the standard library until it knows that it may continue.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Privilege = Literal["root", "user_namespace", "none"]

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Which parts of a virtual network can be made here."""

    privilege: Privilege
    """How a network namespace can be entered: as root, in an unprivileged user namespace, or not at all."""
    veth: bool = False
    """Virtual cables between namespaces."""
    bridge: bool = False
    """A virtual switch that takes a veth as its port."""
    tbf: bool = False
    """Token-bucket shaping: a link of a given bandwidth."""
    htb: bool = False
    """Hierarchical token buckets: several bandwidths on one link."""
    netem: bool = False
    """Added delay and loss."""
    nftables: bool = False
    """Random loss where there is no netem."""
    reason: str = ""
    """Why something above is missing; empty when nothing is."""

    @property
    def virtual_hosts(self) -> bool:
        """Hosts with links of a given bandwidth can be made."""
        return self.privilege != "none" and self.veth and self.bridge and (self.tbf or self.htb)


def detect_capabilities(*, timeout_s: float = 20.0) -> Capabilities:
    """Try everything in a child process; any problem there is described in `reason`."""
    if not sys.platform.startswith("linux"):
        return Capabilities(privilege="none", reason=f"network namespaces need Linux, this is {sys.platform}")
    # By path and with -P: `-m laconic.lab.capabilities` would spend seconds importing torch, and without -P the
    # other files of this folder could hide modules of the standard library.
    command = [sys.executable, "-P", str(Path(__file__).resolve())]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
        return Capabilities(**json.loads(child.stdout))
    except subprocess.TimeoutExpired:
        reason = f"the child process that tries virtual networks did not finish within timeout_s = {timeout_s:g} s"
    except subprocess.CalledProcessError as exc:
        last_line = (exc.stderr.strip().splitlines() or ["no message"])[-1]
        reason = f"the child process that tries virtual networks ended with status {exc.returncode}: {last_line}"
    except (OSError, ValueError, TypeError) as exc:
        reason = f"the child process that tries virtual networks gave no answer: {exc}"
    return Capabilities(privilege="none", reason=reason)


def _try_here() -> Capabilities:
    """Enter a network namespace for the rest of this process's life and try everything in it."""
    privilege, refusal = _enter_network_namespace()
    if privilege == "none":
        return Capabilities(privilege=privilege, reason=refusal)
    try:
        from pyroute2 import IPRoute  # noqa: PLC0415  heavy, and absent on some machines
    except ImportError as exc:
        return Capabilities(privilege=privilege, reason=f"pyroute2 cannot be imported: {exc}")
    with IPRoute() as routes:
        # Shaping is tried on a veth where there is one, because that is where the lab puts it, else on loopback.
        works: dict[str, bool] = {}
        problems: list[str] = []
        for name in ("veth", "bridge", "tbf", "htb", "netem", "nftables"):
            problem = _attempt(routes, name)
            works[name] = problem is None
            if problem is not None:
                problems.append(f"{name}: {problem}")
    return Capabilities(
        privilege=privilege,
        veth=works["veth"],
        bridge=works["bridge"],
        tbf=works["tbf"],
        htb=works["htb"],
        netem=works["netem"],
        nftables=works["nftables"],
        reason="; ".join(problems),
    )


def _enter_network_namespace() -> tuple[Privilege, str]:
    """Enter an empty network namespace; return how that was possible, or why it was not."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) == 0:
        return "root", ""
    as_root = os.strerror(ctypes.get_errno())
    user, group = os.geteuid(), os.getegid()
    # One call, so that the network namespace belongs to the user namespace in which this process is root.
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        in_user_namespace = os.strerror(ctypes.get_errno())
        return "none", f"a network namespace is refused ({as_root}), and so is a user namespace ({in_user_namespace})"
    try:
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1", encoding="ascii")
    except OSError as exc:
        return "none", f"a user namespace was made but its users cannot be mapped ({exc.strerror})"
    return "user_namespace", ""


def _attempt(routes: Any, name: str) -> str | None:
    """Make one object and check that it exists; None, or why not."""
    from pyroute2.netlink.exceptions import NetlinkError  # noqa: PLC0415  as above

    # `routes` is an IPRoute, whose methods pyroute2 makes at run time, invisible to type checkers.
    try:
        if name == "veth":
            routes.link("add", ifname="laconic0", kind="veth", peer={"ifname": "laconic1"})
        elif name == "bridge":
            routes.link("add", ifname="laconic-br", kind="bridge")
            for port in routes.link_lookup(ifname="laconic1"):
                routes.link("set", index=port, master=routes.link_lookup(ifname="laconic-br")[0])
        elif name == "nftables":
            _lose_packets()
        else:
            settings = {
                "tbf": {"rate": "100mbit", "burst": 131072, "latency": "100ms"},
                "htb": {},
                "netem": {"delay": 1000},
            }[name]
            device = [*routes.link_lookup(ifname="laconic0"), *routes.link_lookup(ifname="lo")][0]
            routes.tc("replace", name, device, **settings)
            kinds = [discipline.get_attr("TCA_KIND") for discipline in routes.get_qdiscs(device)]
            if name not in kinds:
                return "accepted by the kernel, but missing afterwards"
    except NetlinkError as exc:
        # ENOENT: no such queueing discipline; EOPNOTSUPP: no such kind of interface.
        missing = exc.code in (errno.ENOENT, errno.EOPNOTSUPP)
        return "this kernel has no such module" if missing else os.strerror(exc.code)
    except Exception as exc:  # noqa: BLE001  versions of pyroute2 differ; one that lacks a call must not hide the rest
        return f"pyroute2 failed: {type(exc).__name__}: {exc}"
    return None


def _lose_packets() -> None:
    """Drop some of the packets that arrive at the loopback interface, as the lab does at its own."""
    # By path: this file runs as a script that does not import laconic.
    spec = importlib.util.spec_from_file_location("keeper", Path(__file__).with_name("keeper.py"))
    assert spec is not None
    assert spec.loader is not None
    keeper = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(keeper)
    keeper.lose("lo", 0.5)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(_try_here())))
