"""Servers whose shares follow from measured links beside servers with equal shares, in the lab.

    python -m benchmarks.server_placement [--rate 100mbit] [--steps 8] [--megabytes 12]

    one slow link   four hosts, the last of them behind a quarter of the rate
    unlike racks    four hosts and two hosts, behind uplinks of the same rate as a host's link

Every contender trains the same model of a few large matrices, whose compute takes next to nothing, so a step is an
exchange with servers on all hosts. They take turns in one job, step by step, and another one begins each time; a time
is that of the slowest rank, and medians are shown, with what the simulator says for the same cluster.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist

import laconic
from benchmarks.found_by_ranks import found_by_ranks, tell
from laconic.cluster import Cluster, Link, Racks, parse_bandwidth
from laconic.core.event import EventList
from laconic.simulator import simulate
from laconic.workload import Layer, TensorShape, Workload

CONTENDERS = tuple(
    f"bsp / parameter_server(placement={placement}) / none / fusion(bytes=1MB, first_bytes=0.5MB)"
    for placement in ("evenly", "measured")
)
LAYERS = 12
WARM_UP = 2


def side(megabytes: float) -> int:
    return max(1, round((megabytes * 1e6 / 4 / LAYERS) ** 0.5))


class Contender:
    """One strategy with a model of its own."""

    def __init__(self, strategy: str, megabytes: float) -> None:
        torch.manual_seed(0)
        events, self.size = EventList(), side(megabytes)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(self.size, self.size, bias=False) for _ in range(LAYERS)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.session = laconic.attach(self.model, self.optimizer, strategy, timeout_s=300, events=events)
        self.shares = next(event.data.get("shares", "") for event in events.events if event.kind == "attach")
        self.seconds: list[float] = []

    def step(self, number: int) -> None:
        torch.manual_seed(1000 * number + dist.get_rank())
        loss = self.model(torch.randn(1, self.size)).square().mean()
        dist.barrier()
        began_s = time.perf_counter()
        loss.backward()
        self.optimizer.step()
        took_s = torch.tensor([time.perf_counter() - began_s], dtype=torch.float64)
        dist.all_reduce(took_s, op=dist.ReduceOp.MAX)
        self.optimizer.zero_grad()
        if number >= WARM_UP:
            self.seconds.append(took_s.item())


def run_rank(steps: int, megabytes: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    contenders = [Contender(strategy, megabytes) for strategy in CONTENDERS]
    for number in range(WARM_UP + steps):
        for turn in range(len(contenders)):
            contenders[(number + turn) % len(contenders)].step(number)
    if dist.get_rank() == 0:
        tell([(one.seconds, one.shares) for one in contenders])
    for one in contenders:
        one.session.detach()
    dist.destroy_process_group()


def predicted_s(strategy: str, cluster: Cluster, megabytes: float) -> float:
    shape = side(megabytes), side(megabytes)
    layers = tuple(
        Layer(name=f"{number}", forward_s=0.0, backward_s=1e-4, tensors=(TensorShape(name=f"{number}", shape=shape),))
        for number in range(LAYERS)
    )
    workload = Workload(name="matrices", batch=1, layers=layers, source="Made up.")
    return simulate(strategy, workload, cluster).prediction.step_s


def measure(name: str, cluster: Cluster, options: argparse.Namespace) -> None:
    arguments = ["--rank", "--steps", str(options.steps), "--megabytes", str(options.megabytes)]
    found: list[tuple[list[float], str]] = found_by_ranks("benchmarks.server_placement", arguments, cluster)[0]
    print(f"\n{name}: {cluster.describe()}; N = {options.megabytes:g} MB")
    before_s, said_before_s = statistics.median(found[0][0]), predicted_s(CONTENDERS[0], cluster, options.megabytes)
    for strategy, (times_s, shares) in zip(CONTENDERS, found, strict=True):
        step_s, said_s = statistics.median(times_s), predicted_s(strategy, cluster, options.megabytes)
        print(
            f"{strategy.split(' / ')[1]:40} {step_s:6.3f} s ({min(times_s):.3f} to {max(times_s):.3f})  predicted "
            f"{said_s:6.3f} s ({said_s / step_s - 1:+.0%})  {before_s / step_s:.2f}x, predicted "
            f"{said_before_s / said_s:.2f}x  {shares}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--megabytes", type=float, default=12.0)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(options.steps, options.megabytes)
        return
    rate_bps = parse_bandwidth(options.rate, "--rate")
    link = Link(bandwidth_bps=rate_bps)
    measure("one slow link", Cluster.uniform(4, link, {3: Link(bandwidth_bps=rate_bps / 4)}), options)
    racks = Cluster(links=(link,) * 6, topology=Racks(sizes=(4, 2), uplinks=(link, link)))
    measure("unlike racks", racks, options)


if __name__ == "__main__":
    main()
