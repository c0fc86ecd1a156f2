"""Sums on the path beside a ring, in the lab: bytes that leave each host and time of a step.

    python -m benchmarks.in_network [--hosts 4] [--rates 50mbit 100mbit 200mbit] [--steps 10] [--megabytes 16]

Every contender trains the same model of one large matrix, whose compute takes next to nothing, so a step is an
exchange. They take turns in one job, step by step, and another one begins each time; a time is that of the slowest
rank, and medians are shown. Bytes are those the kernel has counted at the interface of a host, the largest of all
hosts, divided by N. What the simulator predicts for the same cluster stands beside it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

import laconic
from benchmarks.found_by_ranks import found_by_ranks, tell
from laconic.cluster import Cluster, Link, parse_bandwidth
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.simulator.network.analytic import AnalyticNetwork
from laconic.simulator.network.contract import seconds
from laconic.strategy import Strategy

CONTENDERS = (
    "bsp / all_reduce(ring) / none / sequential",
    "bsp / all_reduce / none / sequential",
    "bsp / in_network / none / sequential",
    "bsp / all_reduce(ring) / intsgd / sequential",
    "bsp / in_network / intsgd / sequential",
)
RING = CONTENDERS[0]
WARM_UP = 2
_ROW = "{:<48} {:>12} {:>10} {:>12} {:>12} {:>8} {:>8}"


def shape(megabytes: float) -> tuple[int, int]:
    return 1000, max(1, round(megabytes * 1e6 / 4 / 1000))


def kernel_sent() -> int:
    """Bytes that have left this host, headers of all layers included."""
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == os.environ["GLOO_SOCKET_IFNAME"]:
            return int(numbers.split()[8])
    raise SystemExit("no interface of this name")


class Contender:
    """One strategy with a model of its own."""

    def __init__(self, strategy: str, megabytes: float) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(*shape(megabytes), bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.session = laconic.attach(self.model, self.optimizer, strategy, timeout_s=300)
        self.seconds: list[float] = []
        self.sent: list[int] = []

    def step(self, number: int) -> None:
        torch.manual_seed(1000 * number + dist.get_rank())
        # One row: the gradient is an outer product, which takes milliseconds.
        loss = self.model(torch.randn(1, self.model.in_features)).square().mean()
        dist.barrier()
        before, began_s = kernel_sent(), time.perf_counter()
        loss.backward()
        self.optimizer.step()
        took_s = time.perf_counter() - began_s
        dist.barrier()
        worst = torch.tensor([took_s, kernel_sent() - before], dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        self.optimizer.zero_grad()
        if number >= WARM_UP:
            self.seconds.append(worst[0].item())
            self.sent.append(int(worst[1].item()))


def run_rank(steps: int, megabytes: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    contenders = [Contender(strategy, megabytes) for strategy in CONTENDERS]
    for number in range(WARM_UP + steps):
        for turn in range(len(contenders)):
            contenders[(number + turn) % len(contenders)].step(number)
    if dist.get_rank() == 0:
        tell([(statistics.median(one.seconds), statistics.median(one.sent)) for one in contenders])
    for one in contenders:
        one.session.detach()
    dist.destroy_process_group()


def predicted_s(strategy: str, cluster: Cluster, megabytes: float) -> float:
    """What the exchange of the one bucket takes, of bytes on links alone."""
    parsed, bucket = Strategy.parse(strategy), Bucket((TensorSpec("weight", shape(megabytes)[::-1]),))
    network, ranks = AnalyticNetwork(cluster), cluster.num_hosts
    moves = parsed.architecture.moves(bucket, parsed.codec, Moment.steady(ranks))
    return sum(seconds(network, move, ranks) for move in moves)


def measure(rate: str, options: argparse.Namespace) -> None:
    cluster = Cluster.uniform(options.hosts, Link(bandwidth_bps=parse_bandwidth(rate, "--rates")))
    arguments = ["--rank", "--steps", str(options.steps), "--megabytes", str(options.megabytes)]
    found: list[tuple[float, float]] = found_by_ranks("benchmarks.in_network", arguments, cluster)[0]
    print(f"\n{options.hosts} hosts behind {rate}, N = {options.megabytes:g} MB")
    print(_ROW.format("strategy", "sent / N", "step", "predicted", "error", "to ring", "pred."))
    first_s, first_predicted_s = found[0][0], predicted_s(RING, cluster, options.megabytes)
    values = 4 * shape(options.megabytes)[0] * shape(options.megabytes)[1]
    for strategy, (step_s, sent) in zip(CONTENDERS, found, strict=True):
        expected_s = predicted_s(strategy, cluster, options.megabytes)
        print(
            _ROW.format(
                strategy.removesuffix(" / sequential"),
                f"{sent / values:.3f}",
                f"{1e3 * step_s:.1f} ms",
                f"{1e3 * expected_s:.1f} ms",
                f"{expected_s / step_s - 1:+.1%}",
                f"{first_s / step_s:.2f}x",
                f"{first_predicted_s / expected_s:.2f}x",
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rates", nargs="+", default=["50mbit", "100mbit", "200mbit"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--megabytes", type=float, default=16.0)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(options.steps, options.megabytes)
        return
    for rate in options.rates:
        measure(rate, options)


if __name__ == "__main__":
    main()
