"""GPT-2 (124 M) on one GPU: how long does each strategy train until it has the loss that torch DDP ends with?

    python -m benchmarks.time_to_loss.gpt2 [--steps 600] [--rates 0.0006] [--bandwidth 1gbit] [--strategies ...]
                                           [--strategy-steps 750] [--times-only ...] [--seeds 1] [--mps auto]
                                           [--warmup 0.05] [--compile model] [--out FOLDER]

Four ranks share the GPU and talk through NCCL over links of virtual hosts. Text is the source of the Python packages on
this machine, in 50257 byte pairs that are learned from it; one file in fifty is held out. Losses are compared on the
same text only. The optimizer is AdamW, or SGD for what gives directions of length one; a strategy written as "STRATEGY
with muon" has Muon for the matrices of the blocks and AdamW for the rest. The rate rises for 5% of the steps (--warmup)
and falls to zero along a cosine. Losses do not depend on the link, so the curve of torch DDP ("torch DDP with muon",
too) comes from one process that adds up the gradients of all ranks, and its step time from a few steps behind each
link. A strategy may also be "auto" or "auto(max_loss_gap=1%)": its decisions are printed. What was trained before is
kept in FOLDER and not trained again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.time_to_loss.contender import Contender
from benchmarks.time_to_loss.gpt2.job import AUTO, DDP, HOOKS, WITHOUT_LACONIC, Job, Outcome, outcome, write
from benchmarks.time_to_loss.gpt2.picture import draw
from benchmarks.time_to_loss.gpt2.rank import vocabulary
from benchmarks.time_to_loss.gpt2.text import prepare
from benchmarks.time_to_loss.gpt2.verdict import table
from laconic.cluster import Cluster, Link, parse_bandwidth
from laconic.errors import LaconicError, one_line
from laconic.lab.launch import places_here, run_ranks
from laconic.lab.mps import GpuSharing, shared_gpu
from laconic.lab.virtual_hosts import VirtualHosts, places_on

STRATEGIES = ("demo-int4", "onebit_adam(first=int4)")


class Kept:
    """Outcomes in a file, one per line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.outcomes = [outcome(line) for line in lines]

    def has(self, job: Job) -> bool:
        """Whether this job was done before."""
        return any(found.job == job for found in self.outcomes)

    def add(self, found: Outcome) -> None:
        """Keep it at once: the next job may take the process down."""
        self.outcomes.append(found)
        with self._path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(asdict(found)) + "\n")


def main() -> int:
    """Train what is missing and print the table."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    kept = Kept(options.out / "gpt2.jsonl")
    tokens = options.out / "tokens.npz"
    failed = 0
    try:
        for text in (*options.strategies, *options.times_only):
            contender = Contender.parse(text)
            if contender.name not in WITHOUT_LACONIC and not contender.name.startswith(AUTO):
                contender.strategy()
        _say("reading the text")
        text = prepare(tokens, vocabulary(options.size), options.text_bytes)
        jobs = _jobs(options, text)
        for job in jobs:
            if kept.has(job):
                continue
            _say(_about(job))
            try:
                found = _run(job, tokens, options)
            except LaconicError as exc:
                _say(f"{_about(job)}: {one_line(exc, 500)}")
                failed += 1
                continue
            kept.add(found)
            loss = f", loss {found.losses[-1]:.4f}" if found.losses else ""
            _say(f"{_about(job)}: {1e3 * found.step_s:.1f} ms/step{loss}")
            for step, strategy, reason in found.decisions:
                _say(f"  step {step}: {strategy}. {reason}")
    except LaconicError as exc:
        print(exc, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; what was finished is kept.", file=sys.stderr)
        return 130
    draw(kept.outcomes, options.bandwidth[0], options.out / "curves.html")
    print("\n".join(table(kept.outcomes, options.steps)))
    print(f"curves: {options.out / 'curves.html'}")
    return 1 if failed else 0


def _jobs(options: argparse.Namespace, text: str) -> list[Job]:
    plain = Job(
        contender=DDP,
        link="",
        steps=options.steps,
        made=options.steps,
        rate=0.0,
        warmup=options.warmup,
        size=options.size,
        context=options.context,
        batch=options.batch,
        device=options.device,
        compiled="none" if options.compile == "none" else "model",
    )
    ours = replace(plain, compiled=options.compile)
    longer = options.strategy_steps or options.steps
    jobs: list[Job] = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for rate in options.rates:
            alone = replace(plain, rate=rate, seed=seed, text=text)
            jobs.append(alone)
            mine = replace(ours, link=options.bandwidth[0], rate=rate, seed=seed, steps=longer, made=longer, text=text)
            for name in options.strategies:
                jobs.append(replace(alone if Contender.parse(name).name == DDP else mine, contender=name))
    for link in options.bandwidth:
        for contender in (DDP, *options.times_only):
            is_ddp = Contender.parse(contender).name in (DDP, *HOOKS)
            made = options.ddp_steps if is_ddp else options.timed_steps
            how = plain if is_ddp else ours
            jobs.append(replace(how, contender=contender, link=link, made=made, rate=options.rates[0]))
    return jobs


def _run(job: Job, tokens: Path, options: argparse.Namespace) -> Outcome:
    """On a shared GPU behind the job's link, or in one process."""
    with tempfile.TemporaryDirectory(prefix="laconic-") as folder:
        config, result = Path(folder) / "job.json", Path(folder) / "outcome.json"
        write(config, job)
        command = [sys.executable, "-m", "benchmarks.time_to_loss.gpt2.rank", str(config), str(tokens), str(result)]
        sharing = GpuSharing(mps=False)
        if not job.link:
            run_ranks(command, places_here(1), timeout_s=options.timeout)
        else:
            on_gpu = job.device == "cuda"
            with shared_gpu(options.mps if on_gpu else "off") as sharing:
                if on_gpu and not sharing.mps:
                    _say(f"{sharing}: {sharing.reason}")
                link = Link(bandwidth_bps=parse_bandwidth(job.link, "--bandwidth"))
                with VirtualHosts(Cluster.uniform(job.ranks, link)) as hosts:
                    # A rank waits for a GPU, not for other ranks' threads.
                    environment = {"OMP_NUM_THREADS": "1", **sharing.environment}
                    places = places_on(hosts, gpu=on_gpu)
                    run_ranks(command, places, timeout_s=options.timeout, environment=environment)
        return replace(outcome(result.read_text(encoding="utf-8")), mps=sharing.mps)


def _about(job: Job) -> str:
    where = f"behind {job.link}" if job.link else "in one process"
    rate = f"rate {job.rate:g}, warm-up {job.warmup:.0%}"
    return f"{job.contender} {where}, {job.made} of {job.steps} steps, {rate}, seed {job.seed}"


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _options(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.time_to_loss.gpt2",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES), metavar="STRATEGY", help="to train")
    parser.add_argument("--times-only", nargs="*", default=[], metavar="STRATEGY", help="to time for some steps only")
    parser.add_argument("--bandwidth", nargs="+", default=["1gbit"], help="the first one is that of whole trainings")
    parser.add_argument("--steps", type=int, default=600, help="of torch DDP, and of strategies unless told otherwise")
    parser.add_argument("--strategy-steps", type=int, help="of strategies: the time that they save buys more steps")
    parser.add_argument("--rates", type=float, nargs="+", default=[6e-4])
    parser.add_argument("--warmup", type=float, default=0.05, help="share of the steps in which the rate rises")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--timed-steps", type=int, default=20)
    parser.add_argument("--ddp-steps", type=int, default=4, help="timed steps of torch DDP and its hooks")
    parser.add_argument("--mps", choices=["auto", "on", "off"], default="auto", help="whether ranks share the GPU so")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="cpu: to try the code")
    parser.add_argument(
        "--compile",
        choices=["blocks", "model", "none"],
        default="model",
        help="what goes through torch.compile with laconic; with torch DDP, which splits the graph itself, the model",
    )
    parser.add_argument("--size", default="gpt2", help="another one: to try the code")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8, help="windows per rank and step")
    parser.add_argument("--text-bytes", type=int, default=150_000_000)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one training")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt2"))
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
