"""The process that holds the virtual hosts: one network namespace each, and one for the switches between them.

Run as a script by virtual_hosts.py, which communicates with it over standard input and output, one JSON line each way:

    -> the cluster        <- {"pid", "as_user", "hosts": [{"namespace", "address", "interface"}], "switch": its address}
    -> {"ask": "counters"}    <- {"hosts": [{"sent_bytes", "received_bytes"}]}
    -> {"shape": links}       <- {}, once every host's link is as given

Namespaces have no names. They exist as long as this process or a process in them does, and this process ends when its
input is closed, however the other end dies: nothing can be left behind. It does not import laconic, so it starts in a
tenth of a second and runs in an image without torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NEW_NET, _NEW_USER = 0x40000000, 0x10000000
_BURST_BYTES = 131_072
_QUEUE_MS = 100
"""How long a packet may wait in a link's queue before it is dropped, and TCP slows down."""
_LARGEST_32_BITS = 2**32 - 1
_NETDEV_FAMILY = 5
_DRAWS = 2**31
"""A packet is lost if a random number below this one is below its share."""
_INTERFACE = "eth0"
_NETWORK, _PREFIX_LENGTH = "10.77.0.0/24", 24
SWITCH_ADDRESS = "10.77.0.254"
"""An address above that of the last host."""


class KeeperProblem(Exception):
    """The kernel or pyroute2 refused a request."""


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        code = ctypes.get_errno()
        raise KeeperProblem(f"{name}: {os.strerror(code)}")


def _enter_namespaces(as_user: bool) -> None:
    """Enter a network namespace of our own; a normal user becomes root in a user namespace for that."""
    if not as_user:
        _call("unshare", _NEW_NET)
        return
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _NEW_USER | _NEW_NET)
    for path, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{path}", "w", encoding="ascii") as file:  # noqa: PTH123 - needs one single write
            file.write(text)


def _own_namespace() -> int:
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


class Fabric:
    """Switches in this process's namespace, hosts in namespaces of their own."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from pyroute2 import IPRoute

        _teach_fast_rates()
        # pyroute2 makes its methods at run time, invisible to type checkers.
        self._open: Callable[[], Any] = IPRoute
        self._netem: bool = spec["netem"]
        self._home = _own_namespace()
        self._links: Any = IPRoute()
        self.hosts: list[int] = []
        self._ports: list[tuple[int, int]] = []
        """Of each host, the index of its interface at the switch and of its own."""
        uplinks = spec["uplinks"]
        self._lossy = any(link["loss_ratio"] for link in [*spec["links"], *uplinks])
        core = self._bridge("core")
        self._give_address(core)
        racks = [self._rack(number, uplink, core) for number, uplink in enumerate(uplinks)] or [core]
        for host, link in enumerate(spec["links"]):
            rack = spec["rack_of"][host] if uplinks else 0
            self.hosts.append(self._host(host, link, racks[rack]))

    def _bridge(self, name: str) -> int:
        self._links.link("add", ifname=name, kind="bridge")
        index = self._links.link_lookup(ifname=name)[0]
        self._links.link("set", index=index, state="up")
        return index

    def _give_address(self, switch: int) -> None:
        """Give the switch an address, so that hosts can reach an aggregator on the switch itself, which has no link."""
        self._links.addr("add", index=switch, address=SWITCH_ADDRESS, prefixlen=_PREFIX_LENGTH)

    def _rack(self, number: int, uplink: dict[str, float], core: int) -> int:
        """A switch with a cable to the core, shaped in both directions."""
        rack = self._bridge(f"rack{number}")
        up, down = f"up{number}", f"down{number}"
        self._links.link("add", ifname=up, kind="veth", peer=down)
        for name, master in ((up, rack), (down, core)):
            index = self._links.link_lookup(ifname=name)[0]
            self._links.link("set", index=index, master=master, state="up")
            self._shape(self._links, index, name, uplink)
        return rack

    def _host(self, number: int, link: dict[str, float], switch: int) -> int:
        _call("unshare", _NEW_NET)
        namespace = _own_namespace()
        _call("setns", self._home, _NEW_NET)
        name = port(number)
        self._links.link("add", ifname=name, kind="veth", peer={"ifname": _INTERFACE, "net_ns_fd": namespace})
        index = self._links.link_lookup(ifname=name)[0]
        self._links.link("set", index=index, master=switch, state="up")
        self._shape(self._links, index, name, link)
        with self._inside(namespace), self._open() as inside:
            for interface in inside.get_links():
                inside.link("set", index=interface["index"], state="up")
                if interface.get_attr("IFLA_IFNAME") == _INTERFACE:
                    self._ports.append((index, interface["index"]))
                    inside.addr("add", index=interface["index"], address=address(number), prefixlen=_PREFIX_LENGTH)
                    _choose_congestion_control(inside, interface["index"], number)
                    self._shape(inside, interface["index"], _INTERFACE, link)
                    if self._lossy:
                        # One packet at a time: the loss of one that stands for forty would be another kind of loss.
                        inside.link("set", index=interface["index"], gso_max_segs=1)
        return namespace

    def shape(self, links: list[dict[str, float]]) -> None:
        """Give hosts other links while they are in use; packets in a queue are lost, as on a real line."""
        for number, (namespace, (at_switch, own), link) in enumerate(zip(self.hosts, self._ports, links, strict=True)):
            self._shape(self._links, at_switch, port(number), link, "replace")
            with self._inside(namespace), self._open() as inside:
                self._shape(inside, own, _INTERFACE, link, "replace")

    def _shape(self, links: Any, index: int, name: str, link: dict[str, float], how: str = "add") -> None:
        """Give one end of a cable the link's bandwidth, and its delay and loss if it has any.

        Without netem, packets are lost where they arrive, so both directions of a cable lose some.
        """
        delays_or_loses = bool(link["delay_s"] or link["loss_ratio"])
        _limit(links, index, link, how, with_netem=delays_or_loses and self._netem)
        if delays_or_loses and not self._netem:
            lose(name, link["loss_ratio"], how)

    @contextmanager
    def _inside(self, namespace: int) -> Iterator[None]:
        _call("setns", namespace, _NEW_NET)
        try:
            yield
        finally:
            _call("setns", self._home, _NEW_NET)

    def counters(self) -> list[dict[str, int]]:
        """Bytes each host has sent and received, as the kernel counted them at the switch."""
        statistics = {link.get_attr("IFLA_IFNAME"): link.get_attr("IFLA_STATS64") for link in self._links.get_links()}
        return [
            {
                "sent_bytes": statistics[port(number)]["rx_bytes"],
                "received_bytes": statistics[port(number)]["tx_bytes"],
            }
            for number in range(len(self.hosts))
        ]


def port(host: int) -> str:
    """The interface of the switch that a host's cable ends at."""
    return f"host{host}"


def address(host: int) -> str:
    """The address of a host; the lab's networks are its own, so every lab uses the same ones."""
    return f"10.77.0.{host + 1}"


def _choose_congestion_control(links: Any, index: int, host: int) -> None:
    """Choose the default congestion control of Linux, whatever this machine uses.

    bbr takes the burst of a token bucket for the link's rate; with it, runs differed by up to 16%. It is set on the
    route to the other hosts, because a namespace's own setting accepts only what the machine allows.
    """
    from pyroute2.netlink.exceptions import NetlinkError

    def choose(name: str) -> None:
        links.route(
            "replace",  # the route that came with the address
            dst=_NETWORK,
            oif=index,
            prefsrc=address(host),
            scope="link",
            proto="kernel",
            metrics={"cc_algo": name},
        )

    try:
        choose("cubic")
    except NetlinkError:
        choose("reno")  # part of every kernel


def _teach_fast_rates() -> None:
    """Make pyroute2's token bucket also send the kernel's 64-bit rate: the 32-bit one ends at 34 Gbit/s."""
    from pyroute2.netlink.rtnl.tcmsg import plugins, sched_tbf
    from pyroute2.netlink.rtnl.tcmsg.common import get_rate_parameters

    known: Any = sched_tbf.options
    kinds: Any = plugins

    class Options(known):
        # The position in this list is the kernel's number of the attribute (linux/pkt_sched.h).
        nla_map = (*known.nla_map[:4], ("TCA_TBF_RATE64", "uint64"))

    class TokenBucket:
        """A class with the interface of pyroute2's module sched_tbf."""

        parent = sched_tbf.parent
        fix_request = staticmethod(sched_tbf.fix_request)
        options = Options

        @staticmethod
        def get_parameters(wanted: dict[str, Any]) -> dict[str, Any]:
            """The parameters that pyroute2 computes, with rates of more than 32 bits."""
            parameters = get_rate_parameters(wanted)
            rate = parameters["rate"]
            # The queue's length is 32 bits too; above 330 Gbit/s it holds less than _QUEUE_MS, which is still plenty.
            for name in ("rate", "limit"):
                parameters[name] = min(parameters[name], _LARGEST_32_BITS)
            attributes = [["TCA_TBF_PARMS", parameters], ["TCA_TBF_RTAB", True]]
            # The kernel takes the larger of the two rates.
            return {"attrs": [*attributes, *([["TCA_TBF_RATE64", rate]] if rate > _LARGEST_32_BITS else [])]}

    kinds["tbf"] = TokenBucket


def _limit(links: Any, index: int, link: dict[str, float], how: str, *, with_netem: bool) -> None:
    """Give traffic that leaves through this interface the link's bandwidth and, by netem, its delay and loss."""
    rate = max(1, int(link["bandwidth_bps"] / 8))
    # The bucket must hold a few milliseconds of traffic, or fast links starve between timer ticks.
    burst = max(_BURST_BYTES, rate // 250)
    if with_netem:
        links.tc(how, "netem", index, handle="1:", delay=int(link["delay_s"] * 1e6), loss=link["loss_ratio"] * 100)
        links.tc(how, "tbf", index, parent="1:", handle="10:", rate=rate, burst=burst, latency=f"{_QUEUE_MS}ms")
    else:
        links.tc(how, "tbf", index, rate=rate, burst=burst, latency=f"{_QUEUE_MS}ms")


def lose(interface: str, loss_ratio: float, how: str = "add") -> None:
    """Drop this share of the packets that arrive at an interface, each at random, by a rule of nftables."""
    from pyroute2.netlink import NLM_F_CREATE, NLM_F_REQUEST
    from pyroute2.netlink.nfnetlink import nftsocket
    from pyroute2.nftables.expressions import genex, verdict
    from pyroute2.nftables.main import NFTables

    tables: Any = NFTables(nfgen_family=_NETDEV_FAMILY)
    try:
        if how == "replace":
            tables.table("del", name=interface)
        tables.table("add", name=interface)
        # By hand: pyroute2's chain() knows no hook of a network device. If the kernel refuses the chain, it refuses the
        # rule too, which is reported.
        chain = nftsocket.nft_chain_msg()
        hook = [("NFTA_HOOK_HOOKNUM", 0), ("NFTA_HOOK_PRIORITY", 0), ("NFTA_HOOK_DEV", interface)]
        chain["attrs"] = [
            ("NFTA_CHAIN_TABLE", interface),
            ("NFTA_CHAIN_NAME", "arriving"),
            ("NFTA_CHAIN_HOOK", {"attrs": hook}),
            ("NFTA_CHAIN_TYPE", "filter"),
            ("NFTA_CHAIN_POLICY", 1),
        ]
        tables.request_put(chain, nftsocket.NFT_MSG_NEWCHAIN, NLM_F_REQUEST | NLM_F_CREATE)
        drawn = [("NFTA_NG_DREG", 1), ("NFTA_NG_MODULUS", _DRAWS), ("NFTA_NG_TYPE", 1), ("NFTA_NG_OFFSET", 0)]
        limit = int(loss_ratio * _DRAWS).to_bytes(4, "big")
        rule = [
            {"attrs": [("NFTA_EXPR_NAME", "numgen"), ("NFTA_EXPR_DATA", {"attrs": drawn})]},
            genex("byteorder", {"sreg": 1, "dreg": 1, "op": 1, "len": 4, "size": 4}),
            genex("cmp", {"sreg": 1, "op": 2, "data": {"attrs": [("NFTA_DATA_VALUE", limit)]}}),
            *verdict(code=0),
        ]
        tables.rule("add", table=interface, chain="arriving", expressions=(rule,))
    finally:
        tables.close()


def _answer(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _shaped(fabric: Fabric, links: list[dict[str, float]]) -> dict[str, Any]:
    try:
        fabric.shape(links)
    except Exception as exc:  # noqa: BLE001 - as in main
        return {"error": f"{type(exc).__name__}: {exc}"}
    return {}


def main() -> int:
    """Build the cluster that the first line describes, then answer until the input is closed."""
    line = sys.stdin.readline()
    if not line:
        return 0
    spec = json.loads(line)
    try:
        _enter_namespaces(spec["as_user"])
        fabric = Fabric(spec)
    except Exception as exc:  # noqa: BLE001 - the other side reports any error
        _answer({"error": f"{type(exc).__name__}: {exc}"})
        return 1
    hosts = [
        {"namespace": namespace, "address": address(number), "interface": _INTERFACE}
        for number, namespace in enumerate(fabric.hosts)
    ]
    _answer({"pid": os.getpid(), "as_user": spec["as_user"], "hosts": hosts, "switch": SWITCH_ADDRESS})
    for line in sys.stdin:
        request = json.loads(line)
        if request == {"ask": "counters"}:
            _answer({"hosts": fabric.counters()})
        elif set(request) == {"shape"}:
            _answer(_shaped(fabric, request["shape"]))
        else:
            _answer({"error": f"unknown request {line.strip()[:80]}"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
