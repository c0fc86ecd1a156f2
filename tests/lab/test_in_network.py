"""in_network in the lab: the aggregator runs on the virtual switch, and each host sends its bytes once."""

from __future__ import annotations

import json
import sys

import pytest

from laconic.cluster import Cluster, Link
from laconic.lab.launch import run_ranks
from laconic.lab.virtual_hosts import VirtualHosts, places_on

pytestmark = [pytest.mark.lab, pytest.mark.timeout(100)]
NUM_HOSTS = 4
NUMEL = 500_000
# One header for each frame of 1440 bytes; a veth pair passes on 44 frames as one packet, so that of lower layers counts
# little. The exponents of floating-point values and a few barriers of 100 bytes come on top.
HEADERS_RATIO = 0.03
FIXED_BYTES = 30_000

RANK = """
import json, os
from pathlib import Path
import torch
import torch.distributed as dist
import laconic

def kernel():
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, colon, numbers = line.partition(":")
        if name.strip() == os.environ["GLOO_SOCKET_IFNAME"]:
            found = list(map(int, numbers.split()))
            return found[8], found[0]

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(1000, 500, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(number):
    torch.manual_seed(10 * number + rank)
    model(torch.randn(2, 1000)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

with laconic.attach(model, optimizer, "bsp / in_network / none / fusion", timeout_s=60) as session:
    step(0)
    dist.barrier()
    counted, moved = session.traffic.sent_bytes("payload"), []
    for number in range(1, 4):
        before = kernel()
        step(number)
        dist.barrier()
        moved.append([after - start for after, start in zip(kernel(), before)])
    # On a busy machine frames are sent again; the quietest step shows what is sent without that.
    sent, received = map(min, zip(*moved))
    counted = session.traffic.sent_bytes("payload") - counted
bits = model.weight.detach().view(torch.int32).long()
bits = int((bits * torch.arange(1, bits.numel() + 1).view_as(bits)).sum())
print("found " + json.dumps([counted, sent, received, bits]))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_every_host_sends_its_bytes_once_and_gets_the_same_bits() -> None:
    found: dict[int, list[int]] = {}

    def on_line(rank: int, line: str) -> None:
        if line.startswith("found "):
            found[rank] = json.loads(line.removeprefix("found "))

    with VirtualHosts(Cluster.uniform(NUM_HOSTS, Link(bandwidth_bps=200e6))) as hosts:
        run_ranks([sys.executable, "-c", RANK], places_on(hosts), timeout_s=80, on_line=on_line)
    assert sorted(found) == list(range(NUM_HOSTS))
    for counted, sent, received, bits in found.values():
        assert counted == 3 * 4 * NUMEL
        counted //= 3
        # Also on the host of rank 0, which has started the aggregator: it runs behind no host's link.
        assert counted <= sent <= counted * (1 + HEADERS_RATIO) + FIXED_BYTES
        assert counted <= received <= counted * (1 + HEADERS_RATIO) + FIXED_BYTES
        assert bits == found[0][3]
