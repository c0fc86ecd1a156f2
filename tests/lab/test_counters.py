"""What the transport counts is what the kernel sees leave the host, headers aside."""

from __future__ import annotations

import json
import sys

import pytest

from laconic.cluster import Cluster, Link
from laconic.lab.launch import run_ranks
from laconic.lab.virtual_hosts import VirtualHosts, places_on

pytestmark = [pytest.mark.lab, pytest.mark.timeout(100)]

# Measured: 0.1% to 0.3% more than counted. A veth pair passes on segments of up to 64 kB as one packet with one header
# (54 bytes of Ethernet, IP and TCP, 12 of options), and acknowledgements of what a host receives count as sent by it.
# The room above that is for a busy machine, where TCP makes smaller segments: 66 bytes on each full one are 4.6%.
HEADERS_RATIO = 0.05
# Two barriers, the heartbeats of the transport and address resolution. Measured: at most 3 kB.
FIXED_BYTES = 10_000

# Every operation between two barriers; counters are read while nobody sends.
RANK = """
import json, os
from pathlib import Path
import torch
import torch.distributed as dist
from laconic.core.torch_distributed import TorchTransport

def kernel_sent():
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, colon, numbers = line.partition(":")
        if name.strip() == os.environ["GLOO_SOCKET_IFNAME"]:
            return int(numbers.split()[8])

torch.set_num_threads(1)
dist.init_process_group("gloo")
transport = TorchTransport(timeout_s=60)
rank, n = transport.rank, transport.world_size
shard = torch.ones(250_000)
rows = torch.ones(n, 250_000)
operations = {
    "all_reduce": lambda: transport.all_reduce(torch.ones(1_000_000)),
    "all_gather": lambda: transport.all_gather(torch.empty_like(rows), shard),
    "reduce_scatter": lambda: transport.reduce_scatter(torch.empty_like(shard), rows),
    "all_to_all": lambda: transport.all_to_all(torch.empty_like(rows), rows),
    "send_receive": lambda: transport.send_receive(
        [((rank + 1) % n, rows)], [((rank - 1) % n, torch.empty_like(rows))]
    ),
    "broadcast": lambda: transport.broadcast(rows),
}
for start in operations.values():
    start().wait()  # connections are made
found = {}
for name, start in operations.items():
    dist.barrier()
    counted, seen = transport.traffic.total_bytes, kernel_sent()
    start().wait()
    dist.barrier()
    found[name] = [transport.traffic.total_bytes - counted, kernel_sent() - seen]
print("found " + json.dumps(found))
transport.close()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_transport_counts_what_leaves_the_host() -> None:
    num_hosts = 3
    found: dict[int, dict[str, tuple[int, int]]] = {}

    def on_line(rank: int, line: str) -> None:
        if line.startswith("found "):
            found[rank] = json.loads(line.removeprefix("found "))

    with VirtualHosts(Cluster.uniform(num_hosts, Link(bandwidth_bps=200e6))) as hosts:
        run_ranks([sys.executable, "-c", RANK], places_on(hosts), timeout_s=80, on_line=on_line)
        at_the_switch = [counter.sent_bytes for counter in hosts.counters()]
    assert sorted(found) == list(range(num_hosts))
    for rank, operations in found.items():
        assert operations["send_receive"][0] == num_hosts * 1_000_000
        for name, (counted, seen) in operations.items():
            assert counted <= seen <= counted * (1 + HEADERS_RATIO) + FIXED_BYTES, f"{name} on rank {rank}"
        # Each operation was run twice, and the switch has seen at least that.
        assert at_the_switch[rank] >= 2 * sum(counted for counted, _ in operations.values())
