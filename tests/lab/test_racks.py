"""Racks behind slow uplinks: ranks find out who shares one, and sums placed by that are faster."""

from __future__ import annotations

import json
import sys

import pytest

from laconic.cluster import Cluster, Link
from laconic.lab.launch import run_ranks
from laconic.lab.virtual_hosts import VirtualHosts, places_on

pytestmark = [pytest.mark.lab, pytest.mark.timeout(100)]

# Host h is in rack h mod 2. An uplink carries half of what one host can send, and a ring of ranks as they are numbered
# leaves its rack at every step: by hand it takes 6 N / b, and the sum inside racks and between them 3 N / b.
RANK = """
import json, time
import torch
import torch.distributed as dist
import laconic

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
found = {}
for strategy in ("ring", "hierarchical, placement=measured"):
    torch.manual_seed(0)
    model = torch.nn.Linear(1000, 375, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(model, optimizer, f"bsp / all_reduce({strategy}) / none / sequential", timeout_s=60) as session:
        times = []
        for step in range(3):
            torch.manual_seed(10 * step + rank)
            dist.barrier()
            began_s = time.perf_counter()
            model(torch.randn(2, 1000)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            times.append(time.perf_counter() - began_s)
        groups = session.strategy.architecture.facts().get("groups")
    bits = int(model.weight.detach().view(torch.int32).long().sum())
    found[strategy] = [groups, min(times[1:]), bits]
print("found " + json.dumps(found))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_placed_sums_are_faster_behind_oversubscribed_uplinks() -> None:
    found: dict[int, dict[str, tuple[str | None, float, int]]] = {}

    def on_line(rank: int, line: str) -> None:
        if line.startswith("found "):
            found[rank] = json.loads(line.removeprefix("found "))

    cluster = Cluster.in_racks(4, Link(bandwidth_bps=100e6), racks=2, oversubscription=4.0, in_turn=True)
    with VirtualHosts(cluster) as hosts:
        run_ranks([sys.executable, "-c", RANK], places_on(hosts), timeout_s=90, on_line=on_line)
    assert sorted(found) == [0, 1, 2, 3]
    (_, flat_s, _), (groups, placed_s, _) = found[0].values()
    assert groups == "0 2 | 1 3"
    # By hand 2; a busy machine adds about the same to both.
    assert flat_s / placed_s > 1.25
    for strategy in found[0]:
        assert len({ranks[strategy][2] for ranks in found.values()}) == 1, "replicas end with the same bits"
