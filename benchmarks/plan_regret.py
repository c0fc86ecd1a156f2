"""Does the planner choose what the lab finds best? 3 workloads x 4 bandwidths x 2 clusters, 10 strategies in each cell.

    python -m benchmarks.plan_regret --keep runs/plan_regret [--cells N] [--slower 4] [--steps 8] [--limit 24min]

The links of each cluster are probed once for each bandwidth. In every cell the planner ranks the strategies from that
probe and the workload, and all of them take turns in a replay on the same links. One cluster has four hosts with equal
links, the other three of which one has half the bandwidth. Workloads are known models with small tensors. All hosts
share the processors of this machine, which no prediction for a cluster knows: with --slower compute takes so many times
as long and links are so many times slower, while processors have the same work, so that it counts for less.

A cell that is in the folder is not measured again, but the planner is asked anew about it, from the probe that is
there: the command may be stopped and started, also with another planner, and ends by itself after --limit. A cell that
fails is told and left out, and tried again the next time. At the end the page with the results is printed, and written
to page.md in the folder.

Regret is what the planner's choice takes to reach plain DDP's loss beyond the best of all, both with measured steps and
with the steps needed that the planner counts with: losses are not measured in a replay.

    regret = measured step x steps needed of the choice / the least such product of all strategies - 1

Wanted: at most 3% in 90% of cells, never above 10%; step times off by 5% in the median, 15% at most.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.page_head import page_head
from benchmarks.sim_vs_lab import shrunk
from laconic.cli.contest_view import watching
from laconic.cluster import Cluster, Link, parse_bandwidth
from laconic.cluster.place import Setting
from laconic.errors import LaconicError, one_line
from laconic.experiments.comparison import Comparison, Network
from laconic.experiments.run import run_comparison
from laconic.experiments.tasks import TaskConfig
from laconic.planner import Question, answer
from laconic.planner.candidates import short_name
from laconic.strategy import Strategy
from laconic.units import format_rate, human_duration, parse_quantity
from laconic.workload import Workload

DIVISORS = {"resnet50": 27, "gpt2": 132, "bert-base": 117}
"""Known models, and by what the size of each tensor is divided: 3.75 MB of gradients are left of each."""
BANDWIDTHS = ("100mbit", "200mbit", "400mbit", "800mbit")
LIKE, UNLIKE = "4 hosts", "3 hosts, one link half as fast"
COMPUTE_S = 0.2
"""Of a step, with --slower 1. Four hosts at 100 Mbit/s send those gradients in 0.45 s, at 800 Mbit/s in 0.06 s."""
_PROBED = ("1KiB", "4KiB", "16KiB", "64KiB", "256KiB", "1MiB", "4MiB")
"""Messages of a probe; the largest of a cell has less than 4 MB."""
_LEAST_PROBED = 2**20
"""Below that the burst of the lab's links counts for too much."""
_PAST = 0.9
"""A cell is begun only if so large a share of the usual time for one is left."""
GOOD, MOST, GOOD_SHARE = 0.03, 0.10, 0.9
MEDIAN_ERROR, LARGEST_ERROR = 0.05, 0.15
FEWEST_STRATEGIES = 10


BUCKETS = "fusion(bytes=600KB, first_bytes=64KB)"
STRATEGIES = (
    f"bsp / all_reduce / none / {BUCKETS}",
    "bsp / all_reduce / none / sequential",
    "bsp / all_reduce / none / mg_wfbp",
    "bsp / all_reduce / none / priority(partition_bytes=128KB, credit_bytes=512KB)",
    "bsp / all_reduce / none / dear(bytes=256KB)",
    f"bsp / all_reduce / bf16 / {BUCKETS}",
    f"bsp / all_reduce / int8 / {BUCKETS}",
    f"bsp / all_reduce / int4 / {BUCKETS}",
    f"bsp / all_reduce / qsgd / {BUCKETS}",
    f"bsp / gossip / none / {BUCKETS}",
)
"""All of them exchange something in every step, so that a few steps suffice, and none starts processes of its own."""


@dataclass(frozen=True)
class Place:
    """What one cell is about."""

    workload: str
    bandwidth: str
    cluster: str

    def __str__(self) -> str:
        return f"{self.workload}, {self.bandwidth}, {self.cluster}"


@dataclass(frozen=True)
class Row:
    """One strategy in one cell."""

    strategy: str
    predicted_s: float
    measured_s: float
    ratio: float
    """Steps needed, as the planner counts them."""
    chosen: bool

    @property
    def error(self) -> float:
        """Of the predicted step, relative to the measured one."""
        return self.predicted_s / self.measured_s - 1

    @property
    def worth_s(self) -> float:
        """Measured time to the progress of one step of plain DDP."""
        return self.measured_s * self.ratio


@dataclass(frozen=True)
class Cell:
    """What was measured with one workload on one cluster."""

    place: Place
    rows: tuple[Row, ...]

    @property
    def chosen(self) -> Row:
        """By the planner."""
        return next(row for row in self.rows if row.chosen)

    @property
    def best(self) -> Row:
        """As measured."""
        return min(self.rows, key=lambda row: row.worth_s)

    @property
    def regret(self) -> float:
        """See above."""
        return self.chosen.worth_s / self.best.worth_s - 1

    def lines(self) -> Iterator[str]:
        """The rows, and the regret."""
        for row in self.rows:
            mark = "chosen" if row.chosen else ""
            yield (
                f"{row.strategy:84} {row.predicted_s * 1e3:8.1f} ms predicted {row.measured_s * 1e3:8.1f} ms measured "
                f"{row.error:+6.1%}  {row.ratio:4.2f}x steps  {mark}"
            )
        yield f"{self.place}: regret {self.regret:.1%}"


class Kept:
    """The folder with what has been measured, with one --slower and number of steps."""

    def __init__(self, folder: Path, settings: dict[str, object]) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "settings.json"
        if path.exists() and (there := json.loads(path.read_text(encoding="utf-8"))) != settings:
            sys.exit(f"{folder} holds cells that were measured with {there}, not with {settings}: give another --keep.")
        path.write_text(json.dumps(settings), encoding="utf-8")

    def cells(self) -> list[Cell]:
        """Those that are done."""
        path = self._folder / "cells.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        documents = [json.loads(line) for line in lines]
        return [Cell(Place(**one["place"]), tuple(Row(**row) for row in one["rows"])) for one in documents]

    def add(self, cell: Cell) -> None:
        """Keep it, whole or not at all."""
        with (self._folder / "cells.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(cell)) + "\n")

    def probed(self, place: Place, made: Cluster, limit: str) -> Cluster:
        """The lab's links with measured curves; probed once."""
        name = f"{place.bandwidth}-{made.num_hosts}-hosts.toml"
        found = self._folder / name
        if not found.exists():
            with tempfile.TemporaryDirectory(prefix="laconic-") as scratch:
                given, fresh = Path(scratch) / "cluster.toml", Path(scratch) / name
                given.write_text(made.to_toml(), encoding="utf-8")
                probe(given, fresh, limit)
                reached = Cluster.load(fresh).measured
                curve = None if reached is None else reached.curve("all_reduce")
                if curve is None or curve.sizes[-1] < _LEAST_PROBED:
                    raise LaconicError(
                        f"the probe of {place.bandwidth} ended with small messages, which a token bucket lets through "
                        "at once. Give --probe more time."
                    )
                found.write_text(fresh.read_text(encoding="utf-8"), encoding="utf-8")
        return Cluster.load(found)

    def write_page(self, text: str) -> None:
        """The results."""
        (self._folder / "page.md").write_text(text, encoding="utf-8")


def probe(given: Path, output: Path, limit: str) -> None:
    """Probe the links of the cluster in a file."""
    laconic = [sys.executable, "-m", "laconic.cli"]
    command = [*laconic, "lab", "--cluster", str(given), "--", *laconic, "probe", "--output", str(output)]
    command += ["--limit", limit, "--sizes", *_PROBED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise LaconicError(f"the probe failed: {one_line((done.stderr or done.stdout)[-400:], 400)}")


def cluster_of(place: Place) -> Cluster:
    """As the lab makes it."""
    bandwidth_bps = parse_bandwidth(place.bandwidth, "--bandwidths")
    link = Link(bandwidth_bps=bandwidth_bps)
    if place.cluster == LIKE:
        return Cluster.uniform(4, link)
    return Cluster.uniform(3, link, {2: Link(bandwidth_bps=bandwidth_bps / 2)})


def measured(job: Workload, made: Cluster, texts: Sequence[str], steps: int) -> dict[str, float]:
    """Typical step times of every strategy in one replay."""
    with tempfile.TemporaryDirectory(prefix="laconic-") as scratch:
        path = Path(scratch) / "job.json"
        path.write_text(job.to_json(), encoding="utf-8")
        comparison = Comparison(
            kind="replay",
            task=TaskConfig(kind="replay", data=str(path)),
            strategies=tuple(texts),
            hosts=made.num_hosts,
            networks=(Network(name="lab", cluster=made),),
            links="shaped",
            steps=steps,
            torch_ddp=False,
            timeout_s=600.0,
        )
        with watching(comparison) as watcher:
            results, _ = run_comparison(comparison, watcher, str(Path(scratch) / "run"))
    return {row.strategy: row.step_ms / 1e3 for row in results.rows}


def workload_of(place: Place, slower: float) -> Workload:
    """As it is replayed."""
    return shrunk(place.workload, COMPUTE_S * slower, divisor=DIVISORS[place.workload])


def cell(place: Place, known: Cluster, took_s: Mapping[str, float], *, slower: float) -> Cell:
    """What the planner says of probed links, beside what was measured."""
    made = cluster_of(place)
    rate = max(link.bandwidth_bps for link in made.links)
    setting = Setting(cluster=known, workers=made.num_hosts, bandwidth_bps=rate)
    # Compute is slept, so nothing is learnt; losses count as for text.
    question = Question(workload=workload_of(place, slower), setting=setting, device=None)
    found = answer(question, among=[Strategy.parse(one) for one in STRATEGIES])
    best = next(choice for choice in found.ranked if str(choice.strategy) in took_s)
    rows = [
        Row(text, choice.step_s, took_s[text], choice.loss.ratio, choice is best)
        for choice in found.choices
        if choice.loss is not None and choice.standing == "ranked" and (text := str(choice.strategy)) in took_s
    ]
    if len(rows) < FEWEST_STRATEGIES:
        raise LaconicError(f"only {len(rows)} strategies were both ranked and measured; {FEWEST_STRATEGIES} are wanted")
    return Cell(place, tuple(rows))


def page(cells: Sequence[Cell], failures: Sequence[str], wanted: int) -> str:
    """The results as Markdown."""
    regrets = [one.regret for one in cells]
    measured_rows = [row for one in cells for row in one.rows]
    lines = page_head("What the planner's choice costs", "plan_regret")
    lines += [
        "In every cell the planner ranked the strategies from a probe of the links, and all of them took turns in a "
        "replay behind these links. Regret is what its choice takes beyond the best one, as measured.",
        "",
    ]
    if cells:
        errors = [abs(row.error) for row in measured_rows]
        good, count = sum(regret <= GOOD for regret in regrets), len(cells)
        median, largest = statistics.median(errors), max(errors)
        goals = [
            ("cells", f"{wanted}", f"{count}", count >= wanted),
            (f"cells with a regret of at most {GOOD:.0%}", f"{GOOD_SHARE:.0%}", f"{good}", good >= GOOD_SHARE * count),
            ("largest regret", f"{MOST:.0%}", f"{max(regrets):.1%}", max(regrets) <= MOST),
            ("error of step times, median", f"{MEDIAN_ERROR:.0%}", f"{median:.1%}", median <= MEDIAN_ERROR),
            ("error of step times, largest", f"{LARGEST_ERROR:.0%}", f"{largest:.1%}", largest <= LARGEST_ERROR),
        ]
        lines += ["| | wanted | found | |", "|---|---:|---:|---|"]
        lines += [f"| {what} | {goal} | {found} | {'' if met else 'missed'} |" for what, goal, found, met in goals]
        lines += ["", "| workload | bandwidth | cluster | chosen | best | regret | error, median | error, largest |"]
        lines += ["|---|---|---|---|---|---:|---:|---:|"]
        for one in cells:
            off = [abs(row.error) for row in one.rows]
            fields = [*asdict(one.place).values(), _shown(one.chosen), _shown(one.best), f"{one.regret:.1%}"]
            lines.append(f"| {' | '.join(fields)} | {statistics.median(off):.1%} | {max(off):.1%} |")
        lines += ["", "| strategy | error, median | lowest | highest |", "|---|---:|---:|---:|"]
        by_strategy: dict[str, list[float]] = defaultdict(list)
        for row in measured_rows:
            by_strategy[_shown(row)].append(row.error)
        for name, off in by_strategy.items():
            lines.append(f"| {name} | {statistics.median(off):+.1%} | {min(off):+.1%} | {max(off):+.1%} |")
    lines += ["", *(f"Failed: {failure}." for failure in failures)]
    return "\n".join(lines).rstrip() + "\n"


def _shown(row: Row) -> str:
    return f"`{short_name(Strategy.parse(row.strategy))}`"


def asked_anew(done: Sequence[Cell], kept: Kept, options: argparse.Namespace, failures: list[str]) -> Iterator[Cell]:
    """What the planner of today says of measured cells."""
    for one in done:
        took_s = {row.strategy: row.measured_s for row in one.rows}
        try:
            known = kept.probed(one.place, cluster_of(one.place), options.probe)
            yield cell(one.place, known, took_s, slower=options.slower)
        except LaconicError as exc:
            failures.append(f"{one.place}: {one_line(exc, 400)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--keep", default="runs/plan_regret", metavar="DIR", help="cells that are there are not measured again"
    )
    parser.add_argument("--cells", type=int, help="measure at most so many now")
    parser.add_argument("--workloads", nargs="+", default=list(DIVISORS), choices=list(DIVISORS))
    parser.add_argument("--bandwidths", nargs="+", default=BANDWIDTHS, help="before they are divided by --slower")
    parser.add_argument("--slower", type=float, default=4.0, help="compute and links, so that processors matter less")
    parser.add_argument("--steps", type=int, default=8, help="of every strategy; fewer than 8 time too few steps")
    parser.add_argument("--probe", default="3min", help="how long each probe may take")
    parser.add_argument("--limit", default="24min", help="begin no cell that would end later")
    options = parser.parse_args()
    if options.slower <= 0:
        parser.error(f"--slower must be above 0, got {options.slower:g}")
    limit_s = parse_quantity(options.limit, "time", "--limit")
    kept = Kept(Path(options.keep), {"slower": options.slower, "steps": options.steps})
    done, failures, took_s = kept.cells(), list[str](), list[float]()
    places = [
        Place(model, format_rate(parse_bandwidth(bandwidth, "--bandwidths") / options.slower), kind)
        for kind in (LIKE, UNLIKE)
        for bandwidth in options.bandwidths
        for model in options.workloads
    ]
    missing = [place for place in places if place not in {one.place for one in done}]
    print(f"{len(places)} cells, {len(places) - len(missing)} of them measured before", file=sys.stderr, flush=True)
    began_s = time.monotonic()
    for number, place in enumerate(missing[: options.cells]):
        so_far_s = time.monotonic() - began_s
        usual_s = statistics.median(took_s) if took_s else 0.0
        if so_far_s + _PAST * usual_s > limit_s:
            print(f"{options.limit} are over: run the command again for the rest", file=sys.stderr, flush=True)
            break
        left_s = usual_s * (len(missing[: options.cells]) - number)
        told = f", about {human_duration(left_s)} to go" if took_s else ""
        print(f"cell {number + 1} of {len(missing)}: {place}; {so_far_s:.0f} s so far{told}", file=sys.stderr)
        try:
            known = kept.probed(place, cluster_of(place), options.probe)
            took = measured(workload_of(place, options.slower), cluster_of(place), STRATEGIES, options.steps)
            found = cell(place, known, took, slower=options.slower)
        except LaconicError as exc:
            failures.append(f"{place}: {one_line(exc, 400)}")
            print(failures[-1], file=sys.stderr, flush=True)
            continue
        finally:
            took_s.append(time.monotonic() - began_s - so_far_s)
        kept.add(found)
        done.append(found)
        print("\n".join(found.lines()), file=sys.stderr, flush=True)
    text = page(list(asked_anew(done, kept, options, failures)), failures, wanted=len(DIVISORS) * len(BANDWIDTHS) * 2)
    kept.write_page(text)
    print(text)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
