"""What `auto` makes of links of several speeds, compared with fixed strategies, and how soon it follows a change.

    python -m benchmarks.auto [--links 50mbit 500mbit unlimited drop] [--steps 300] [--keep DIR]

Four hosts replay a small model: they sleep for the time of compute and exchange real gradients. On each link the fixed
strategies make a few steps one after the other, then "auto(max_loss_gap=5%)" makes --steps, from DDP's strategy on.
`drop` begins at 500 Mbit/s and becomes 50 Mbit/s in the middle; fixed strategies run at 50 Mbit/s there. `unlimited`
are four processes side by side. Losses are not measured here: the best fixed strategy is the one whose measured step,
times the steps that the planner says it needs for DDP's loss, is the shortest; `auto` is judged by the same product.

The goals: after `auto` has chosen, its time to DDP's loss is within 5% of that of the best fixed strategy, and it is
never more than 2% slower than DDP; after a drop, `auto` makes a new plan within 50 steps. The table marks where the
second goal is missed, and the text below it where the third is. A link that is in the folder --keep is not measured
again.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

import laconic
from benchmarks.page_head import page_head
from benchmarks.sim_vs_lab import shrunk
from laconic.auto.decisions import WINDOW_STEPS, look_steps, typical_s
from laconic.cluster import Cluster, Link, parse_bandwidth
from laconic.core.clock import WallClock
from laconic.core.event import EventList
from laconic.experiments.replayed import NoUpdate, ReplayedModel
from laconic.lab.launch import Place, places_here, run_ranks
from laconic.lab.virtual_hosts import VirtualHosts, places_on
from laconic.losses import Scale, loss_cost
from laconic.planner.candidates import short_name
from laconic.strategy import Strategy
from laconic.workload import Workload

HOSTS = 4
DROP = "drop"
LINKS = ("50mbit", "500mbit", "unlimited", DROP)
FIXED = (
    "bsp / all_reduce / none / fusion",
    "bsp / all_reduce / bf16 / fusion",
    "bsp / all_reduce / int8 / fusion",
    "bsp / all_reduce / qsgd / fusion",
    "diloco(period=16) / all_reduce / none / fusion",
)
DDP = FIXED[0]
BEFORE, AFTER = "500mbit", "50mbit"
"""Of `drop`."""
LOSS_GAP = 0.05
COMPUTE_S, DIVISOR = 0.1, 264
"""GPT-2 with tensors of 1.9 MB in all: an all-reduce takes 0.45 s at 50 Mbit/s and 0.05 s at 500 Mbit/s."""
WARM = 10
"""Steps of each run that are not judged."""
MOST_SLOWER, MOST_STEPS = 0.02, 50
DROPS = "drop now"
_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Run:
    """What every rank does on one link."""

    steps: int
    drops: bool
    result: str


@dataclass(frozen=True)
class Found:
    """What rank 0 saw on one link."""

    link: str
    fixed_s: dict[str, float]
    """A typical step of each fixed strategy."""
    times_s: list[float]
    """Of every step under auto."""
    decisions: list[tuple[int, str, str]]
    """The step, the strategy and the reason of each."""
    dropped_at: int | None

    @property
    def ends_with(self) -> str:
        """The strategy after the last decision but the one that ends training."""
        told = [strategy for step, strategy, _ in self.decisions if step < len(self.times_s)]
        return told[-1] if told else DDP

    @property
    def auto_s(self) -> float:
        """A typical step once the last choice was made: the last two looks before the end."""
        strategy = Strategy.parse(self.ends_with)
        return typical_s(self.times_s[-2 * look_steps(strategy) :], strategy)

    @property
    def replanned_after(self) -> int | None:
        """Steps from the drop to the first decision after it."""
        if self.dropped_at is None:
            return None
        later = [step - self.dropped_at for step, _, _ in self.decisions if self.dropped_at < step < len(self.times_s)]
        return min(later, default=None)


def ratio(strategy: str, job: Workload, steps: int) -> float:
    """Steps needed for DDP's loss, as the planner counts them; infinite beyond the loss that is allowed."""
    scale = Scale(num_parameters=job.num_parameters, workers=HOSTS, hosts=HOSTS, steps=steps)
    loss = loss_cost(Strategy.parse(strategy), scale)
    return float("inf") if loss is None or loss.gap > LOSS_GAP else loss.ratio


def steps_of(job: Workload, strategy: str, steps: int, on_step: Callable[[int], None]) -> tuple[list[float], EventList]:
    """Time each step of a replay on this rank."""
    model, events = ReplayedModel(job), EventList()
    optimizer = NoUpdate(model.parameters())
    total_steps = steps if strategy.startswith("auto") else None
    times_s: list[float] = []
    with laconic.attach(
        model, optimizer, strategy, init_sync=False, timeout_s=120, total_steps=total_steps, events=events
    ):
        clock = WallClock()
        ended_s = clock.now()
        for step in range(steps):
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
            now_s = clock.now()
            times_s.append(now_s - ended_s)
            ended_s = now_s
            on_step(step + 1)
    return times_s, events


def rank(run: Run) -> None:
    """All of one rank."""
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
    logging.getLogger("laconic").setLevel(logging.INFO)
    dist.init_process_group("gloo")
    job, first = shrunk("gpt2", COMPUTE_S, DIVISOR), dist.get_rank() == 0
    fixed_s: dict[str, float] = {}
    if not run.drops:
        for text in FIXED:
            strategy = Strategy.parse(text)
            times_s, _ = steps_of(job, text, WARM + 2 * look_steps(strategy), lambda _: None)
            fixed_s[text] = typical_s(times_s[WARM:], strategy)
            dist.barrier()

    def tell(step: int) -> None:
        if first and step % WINDOW_STEPS == 0:
            print(f"step {step} of {run.steps}", flush=True)
        if first and run.drops and step == run.steps // 2:
            print(DROPS, flush=True)

    times_s, events = steps_of(job, f"auto(max_loss_gap={LOSS_GAP:.0%})", run.steps, tell)
    if first:
        decisions = [
            (event.step, str(event.data["strategy"]), str(event.data["reason"]))
            for event in events.events
            if event.kind == "auto"
        ]
        found = Found("", fixed_s, times_s, decisions, run.steps // 2 if run.drops else None)
        Path(run.result).write_text(json.dumps(asdict(found)), encoding="utf-8")
    dist.destroy_process_group()


def read(path: Path) -> Found:
    """What was seen on one link."""
    document = json.loads(path.read_text(encoding="utf-8"))
    decisions = [(step, strategy, reason) for step, strategy, reason in document.pop("decisions")]
    return Found(**document, decisions=decisions)


def measured(link: str, steps: int) -> Found:
    """Run the ranks on one link."""
    with tempfile.TemporaryDirectory(prefix="laconic-") as scratch:
        result, config = Path(scratch) / "found.json", Path(scratch) / "run.json"
        config.write_text(json.dumps(asdict(Run(steps, link == DROP, str(result)))), encoding="utf-8")
        run_behind(link, [sys.executable, "-m", "benchmarks.auto", "--rank", str(config)])
        return replace(read(result), link=link)


def run_behind(link: str, command: list[str]) -> None:
    """Run four ranks behind a link; that of `drop` becomes slow as soon as the first rank prints DROPS."""
    with ExitStack() as lab:
        places: list[Place] = places_here(HOSTS)
        hosts: VirtualHosts | None = None
        if link != "unlimited":
            bandwidth_bps = parse_bandwidth(BEFORE if link == DROP else link, "--links")
            hosts = lab.enter_context(VirtualHosts(Cluster.uniform(HOSTS, Link(bandwidth_bps=bandwidth_bps))))
            places = places_on(hosts)
        slow = Link(bandwidth_bps=parse_bandwidth(AFTER, "--links"))

        def on_line(number: int, line: str) -> None:
            if line == DROPS and hosts is not None:
                # Not on the thread that reads the output of a rank: the answer may take a while.
                threading.Thread(target=hosts.shape, args=([slow] * HOSTS,)).start()
            if number == 0:
                print(f"{link:>9}  {line}", file=sys.stderr, flush=True)

        run_ranks(command, places, timeout_s=_TIMEOUT_S, environment={"OMP_NUM_THREADS": "1"}, on_line=on_line)


def page(all_found: Sequence[Found]) -> str:
    """The results as Markdown."""
    by_link = {found.link: found for found in all_found}
    job = shrunk("gpt2", COMPUTE_S, DIVISOR)
    lines = page_head("What auto chooses, compared with fixed strategies", "auto")
    lines += [
        f"Four hosts replay the workload `{job.name}`: they sleep for the time of compute and exchange the gradients "
        f"of a GPT-2 whose tensors are {DIVISOR} times smaller. Times are milliseconds per step, multiplied by the "
        "number of steps that a strategy needs to reach DDP's loss and divided by the number that DDP needs.",
        "",
        "| link | DDP | best fixed strategy | its time | auto ends with | its time | to the best | to DDP |",
        "|---|---:|---|---:|---|---:|---:|---:|",
    ]
    for found in all_found:
        fixed_s = found.fixed_s or (by_link[AFTER].fixed_s if AFTER in by_link else {})
        own_s = found.auto_s * ratio(found.ends_with, job, len(found.times_s))
        told = [f"{found.link}", "", "", "", _shown(found.ends_with), f"{own_s * 1e3:.0f}", "", ""]
        if fixed_s:
            worth_s = {text: time_s * ratio(text, job, len(found.times_s)) for text, time_s in fixed_s.items()}
            best = min(worth_s, key=lambda text: worth_s[text])
            slower = own_s / worth_s[DDP] - 1
            told[1:4] = [f"{worth_s[DDP] * 1e3:.0f}", _shown(best), f"{worth_s[best] * 1e3:.0f}"]
            missed = ", missed" if slower > MOST_SLOWER else ""
            told[6:] = [f"{own_s / worth_s[best] - 1:+.1%}", f"{slower:+.1%}{missed}"]
        lines.append(f"| {' | '.join(told)} |")
    lines += ["", "| link | step | strategy | reason |", "|---|---:|---|---|"]
    lines += [
        f"| {found.link} | {step} | {_shown(strategy)} | {reason} |"
        for found in all_found
        for step, strategy, reason in found.decisions
    ]
    for found in all_found:
        if found.dropped_at is not None:
            steps = found.replanned_after
            met = steps is not None and steps <= MOST_STEPS
            said = "never" if steps is None else f"after {steps} steps"
            before_s = statistics.median(found.times_s[found.dropped_at - WINDOW_STEPS : found.dropped_at])
            lines += [
                "",
                f"The link dropped from {BEFORE} to {AFTER} at step {found.dropped_at}; until then a step took "
                f"{before_s * 1e3:.0f} ms. `auto` made a new plan {said} (goal: {MOST_STEPS}"
                f"{'' if met else '; missed'}).",
            ]
    return "\n".join(lines) + "\n"


def _shown(strategy: str) -> str:
    return f"`{short_name(Strategy.parse(strategy))}`"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", default=LINKS, choices=LINKS)
    parser.add_argument("--steps", type=int, default=300, help="under auto")
    parser.add_argument(
        "--keep", default="runs/auto", metavar="DIR", help="links that are there are not measured again"
    )
    parser.add_argument("--rank", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank(Run(**json.loads(Path(options.rank).read_text(encoding="utf-8"))))
        return
    folder, all_found = Path(options.keep), list[Found]()
    folder.mkdir(parents=True, exist_ok=True)
    for link in options.links:
        path = folder / f"{link}-{options.steps}.json"
        if not path.exists():
            path.write_text(json.dumps(asdict(measured(link, options.steps))), encoding="utf-8")
        all_found.append(read(path))
    text = page(all_found)
    (folder / "page.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
