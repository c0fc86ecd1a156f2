"""Virtual hosts on this machine: network namespaces behind real, shaped links, for the duration of a `with` block.

with VirtualHosts(Cluster.uniform(4, Link(bandwidth_bps=100e6))) as hosts:
    subprocess.Popen(command, preexec_fn=hosts.entrance(2))     # runs on host 2
    hosts.counters()                                            # bytes each host has sent, counted by the kernel
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from types import TracebackType
from typing import Any, Self

from laconic.cluster import Cluster, Link
from laconic.cluster.cluster_file import check_host
from laconic.core.child_process import die_with_parent
from laconic.core.switch import SWITCH_VARIABLE, Switch
from laconic.errors import LaconicError, UsageError, one_line
from laconic.lab import keeper, leftovers
from laconic.lab.capabilities import Capabilities, detect_capabilities
from laconic.lab.launch import Place, torchrun_environment

_ANSWER_S = 20.0
"""How long the keeper may take to answer; building 250 hosts takes about three seconds."""
_NEW_NET, _NEW_USER = 0x40000000, 0x10000000
_MOST_HOSTS = 250
"""Host numbers are the last byte of an address."""
NO_HOSTNAME = "The hostname of the client socket cannot be retrieved"
"""A warning that torch gives on every rank: virtual hosts have addresses but no names, and nothing needs names."""
_MASTER_PORT = 29500
"""Any port does: each lab has a network of its own."""


@dataclass(frozen=True)
class HostCounter:
    """Bytes a host has sent and received, headers of all layers included."""

    sent_bytes: int
    received_bytes: int


class VirtualHosts:
    """The hosts of a cluster, made when the block is entered and gone when it is left."""

    def __init__(self, cluster: Cluster, capabilities: Capabilities | None = None) -> None:
        self.cluster = cluster
        self._capabilities = capabilities or detect_capabilities()
        check_possible(cluster, self._capabilities)
        self._process: subprocess.Popen[str] | None = None
        self._hosts: list[dict[str, Any]] = []
        self._pid = 0
        self._switch = ""
        self._as_user = self._capabilities.privilege == "user_namespace"

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(keeper.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, leftovers.VARIABLE: leftovers.new_mark()},
        )
        spec = {
            "links": [asdict(link) for link in self.cluster.links],
            "rack_of": self.cluster.rack_of,
            "uplinks": [asdict(link) for link in self.cluster.uplinks],
            "as_user": self._as_user,
            "netem": self._capabilities.netem,
        }
        try:
            answer = self._ask(spec, "the virtual hosts")
        except BaseException:
            self._end()
            raise
        self._pid, self._hosts, self._switch = answer["pid"], answer["hosts"], answer["switch"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        # Closing flushes a buffered request that the ended process has not read.
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()

    def _ask(self, request: dict[str, Any], what: str) -> dict[str, Any]:
        process = self._process
        if process is None:
            raise LaconicError("the virtual hosts have been removed; use them inside the with block.")
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except BrokenPipeError as exc:
            raise LaconicError(f"the process that keeps {what} is gone (exit code {process.poll()}).") from exc
        with DefaultSelector() as selector:
            selector.register(process.stdout, EVENT_READ)
            if not selector.select(_ANSWER_S):
                raise LaconicError(f"{what} gave no answer in {_ANSWER_S:g} s.")
        line = process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"its process ended with {process.wait()}"}
        if "error" in answer:
            raise LaconicError(
                f"cannot make {what}: {one_line(answer['error'])}. laconic doctor shows what this machine allows."
            )
        return answer

    def address(self, host: int) -> str:
        """The address of a host."""
        return self._hosts[host]["address"]

    def interface(self, host: int) -> str:
        """The name of a host's network interface."""
        return self._hosts[host]["interface"]

    @property
    def switch(self) -> Switch:
        """The switch that joins the hosts, or their racks."""
        return Switch(self._switch, f"/proc/{self._pid}/ns/net")

    def counters(self) -> list[HostCounter]:
        """The kernel's counters so far, per host."""
        return [HostCounter(**host) for host in self._ask({"ask": "counters"}, "the counters")["hosts"]]

    def shape(self, links: Sequence[Link]) -> None:
        """Give the hosts other links while processes run on them, as when a network becomes slow: one for each host."""
        if len(links) != self.cluster.num_hosts:
            raise UsageError(f"there are {self.cluster.num_hosts} hosts, and {len(links)} links were given.")
        changed = replace(self.cluster, links=tuple(links))
        check_possible(changed, self._capabilities)
        for before, after in zip(self.cluster.links, links, strict=True):
            if bool(before.delay_s or before.loss_ratio) != bool(after.delay_s or after.loss_ratio):
                raise UsageError(
                    "shape() can change the delay and loss of a link that has some, but not add them to a link without "
                    "any, nor remove both."
                )
        self._ask({"shape": [asdict(link) for link in links]}, "other links")
        self.cluster = changed

    def entrance(self, host: int) -> Callable[[], None]:
        """The function a child process must call between fork and exec to run on `host`, and to die with its parent."""
        return self._entrance(self.namespace(host))

    def entrance_to_switch(self) -> Callable[[], None]:
        """As `entrance`, for a process on the switch itself, to which no shaped link of its own leads."""
        return self._entrance(self.switch.namespace)

    def namespace(self, host: int) -> str:
        """The file of a host's network namespace."""
        return f"/proc/{self._pid}/fd/{self._hosts[host]['namespace']}"

    def _entrance(self, namespace: str) -> Callable[[], None]:
        user = f"/proc/{self._pid}/ns/user" if self._as_user else None
        # Looked up before the fork: the child must not need locks that another thread may hold.
        libc = ctypes.CDLL(None, use_errno=True)
        bind_to_parent = die_with_parent()
        assert bind_to_parent is not None  # virtual hosts need Linux

        def enter() -> None:
            bind_to_parent()
            network_fd = os.open(namespace, os.O_RDONLY)
            if user is not None:
                user_fd = os.open(user, os.O_RDONLY)
                if libc.setns(user_fd, _NEW_USER):
                    raise OSError(ctypes.get_errno(), "cannot enter the user namespace")
                os.close(user_fd)
            if libc.setns(network_fd, _NEW_NET):
                raise OSError(ctypes.get_errno(), "cannot enter the network namespace")
            os.close(network_fd)

        return enter


def check_possible(cluster: Cluster, capabilities: Capabilities) -> None:
    """Raise, with the alternatives, if this machine cannot make such hosts."""
    if not capabilities.virtual_hosts:
        raise UsageError(
            f"virtual hosts are not possible here: {capabilities.reason or 'no privilege'}. Run as root, or allow "
            "unprivileged user namespaces."
        )
    check_imitable(cluster)
    links = (*cluster.links, *cluster.uplinks)
    if not capabilities.netem and any(link.delay_s for link in links):
        raise UsageError(
            "this kernel has no netem, so links can have a bandwidth but no delay. Leave out --delay, or load "
            "sch_netem."
        )
    if not (capabilities.netem or capabilities.nftables) and any(link.loss_ratio for link in links):
        raise UsageError(
            "this kernel has neither netem nor nftables with random numbers, so links cannot lose packets. Leave out "
            "--loss, or load sch_netem, or nf_tables and nft_numgen."
        )


def check_imitable(cluster: Cluster) -> None:
    """Raise for clusters that only the simulator supports."""
    if cluster.num_hosts > _MOST_HOSTS:
        raise UsageError(f"the lab makes at most {_MOST_HOSTS} hosts, got {cluster.num_hosts}.")
    if not cluster.topology.in_lab:
        raise UsageError(f"the lab can connect hosts by one switch or by racks, got {cluster.topology.describe()}.")
    if cluster.devices_per_host > 1 or cluster.nics > 1:
        raise UsageError(
            f"the lab has one device and one NIC per host, got {cluster.devices_per_host} and {cluster.nics}. Leave "
            "them out and give --ranks-per-host."
        )
    if set(cluster.speeds) != {1.0}:
        raise UsageError("the lab cannot make a host compute slower or faster. Leave out speed.")


def places_on(
    hosts: VirtualHosts, *, ranks_per_host: int = 1, gpu: bool = False, members: Sequence[int] | None = None
) -> list[Place]:
    """Ranks on virtual hosts, host by host, with the variables that make Gloo and NCCL use the shaped links.

    gpu: ranks share one GPU; a host id each makes NCCL take them for ranks on different hosts.
    members: the hosts of this job, where other jobs run at the same time; all hosts if left out.
    """
    if ranks_per_host < 1:
        raise UsageError(f"ranks per host must be >= 1, got {ranks_per_host}.")
    members = range(hosts.cluster.num_hosts) if members is None else members
    for host in members:
        check_host(host, hosts.cluster.num_hosts)
    world_size = len(members) * ranks_per_host
    places: list[Place] = []
    for rank in range(world_size):
        number = rank // ranks_per_host
        host = members[number]
        interface = hosts.interface(host)
        environment = torchrun_environment(
            rank,
            world_size,
            host=number,
            ranks_per_host=ranks_per_host,
            master=(hosts.address(members[0]), _MASTER_PORT),
        )
        environment[SWITCH_VARIABLE] = hosts.switch.write()
        environment |= {"GLOO_SOCKET_IFNAME": interface, "TP_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        if gpu:
            environment |= gpu_environment(rank, interface)
        places.append(Place(environment, hosts.entrance(host)))
    return places


def gpu_environment(rank: int, interface: str) -> dict[str, str]:
    """Variables that make NCCL treat ranks on one GPU as ranks on different hosts, connected by `interface`."""
    return {"NCCL_HOSTID": f"laconic-{rank}", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": interface}
