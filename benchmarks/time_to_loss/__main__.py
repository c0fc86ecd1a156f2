"""How long does each strategy train until it has the loss that torch DDP ends with?

    python -m benchmarks.time_to_loss [--steps 1500] [--seeds 3] [--rates 0.0005 0.001 0.002] [--lengths 1 1.5]
                                      [--bandwidth 100mbit] [--strategies ...] [--size small] [--losses] [--out FOLDER]

Four workers train a small GPT on the standard library's source text with AdamW; the learning rate rises for 5% of the
steps and falls to zero along a cosine; what gives directions of length one, such as demo, is applied by SGD. A strategy
written as "STRATEGY with muon" ("ddp with muon", too) has Muon for the matrices of the blocks and AdamW for the rest.
For every strategy, DDP included, the rate is the one of the same grid with which the first seed's final loss is lowest;
the other seeds are trained with that. Lossless strategies have DDP's curve by construction. A strategy that loses
something may train for longer (--lengths). What a step takes behind each link is measured by `laconic compare`, with
AdamW; losses do not depend on links. Curves are kept in FOLDER and not trained again.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.time_to_loss.contender import Contender
from benchmarks.time_to_loss.curves import Kept, Run
from benchmarks.time_to_loss.picture import draw
from benchmarks.time_to_loss.step_times import measure
from benchmarks.time_to_loss.verdict import HEAD, LOSS_HEAD, Question, lines, loss_lines, sentence
from laconic.errors import LaconicError

STRATEGIES = (
    "onebit-adam",
    "onebit_adam(first=int4)",
    "bsp / all_reduce / int8",
    "bsp / all_reduce / onebit + error_feedback",
    "powersgd",
    "local_sgd(period=8) / all_reduce / int4 + error_feedback",
    "streaming-diloco-int4",
)


def main() -> int:
    """Train what is missing, time steps, print the table and the sentences."""
    options = _options()
    folder: Path = options.out
    folder.mkdir(parents=True, exist_ok=True)
    question = Question(
        options.size,
        options.batch,
        options.steps,
        tuple(sorted(options.lengths)),
        tuple(options.rates),
        options.seeds,
    )
    try:
        for strategy in options.strategies:
            Contender.parse(strategy).strategy()
        kept = Kept(folder / "curves.jsonl")
        trained = ("ddp", *options.strategies)
        _train(kept, [run for strategy in trained for run in question.trials(strategy)], options.jobs)
        _train(kept, [run for strategy in trained for run in question.runs(kept, strategy)], options.jobs)
        every = [question.best(kept, strategy, question.lengths[0]) for strategy in options.strategies]
        shown = {"torch DDP": question.best(kept, "ddp", 1.0), **dict(zip(options.strategies, every, strict=True))}
        draw(shown, folder / "curves.html")
        print("\n".join([LOSS_HEAD, *loss_lines(question, kept, options.strategies), ""]))
        if options.losses:
            return 0
        intervals = [Contender.parse(text).strategy().synchronization.interval for text in options.strategies]
        times_s = measure(
            options.strategies,
            options.bandwidth,
            size=options.size,
            batch=options.batch,
            steps=max(options.timed_steps, 2 * max(intervals) + 4),
            folder=folder / time.strftime("compare-%Y%m%d-%H%M%S"),
        )
    except LaconicError as exc:
        print(exc, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; curves that were finished are kept.", file=sys.stderr)
        return 130
    found = lines(question, kept, options.strategies, times_s, options.bandwidth)
    print(HEAD)
    for line in found:
        print(line.text())
    for link in options.bandwidth:
        print(sentence(link, [line for line in found if line.link == link]))
    print(f"curves: {folder / 'curves.html'}")
    return 0


def _train(kept: Kept, runs: list[Run], jobs: int) -> None:
    for curve in kept.train(runs, jobs):
        about = f"{curve.run.strategy}, rate {curve.run.rate:g}, seed {curve.run.seed}, {curve.run.steps} steps"
        print(f"{about}: {curve.losses[-1]:.4f} in {curve.seconds:.0f} s", file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.time_to_loss",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", default="small", choices=["tiny", "small", "medium"])
    parser.add_argument("--batch", type=int, default=2, help="samples per worker and step")
    parser.add_argument("--steps", type=int, default=1500, help="of DDP")
    parser.add_argument(
        "--lengths", type=float, nargs="+", default=[1.0], help="of other strategies, as a share of that"
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-4, 1e-3, 2e-3], help="the grid of learning rates")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--bandwidth", nargs="+", default=["100mbit"])
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), metavar="STRATEGY")
    parser.add_argument("--timed-steps", type=int, default=24, help="of each strategy behind each link")
    parser.add_argument("--losses", action="store_true", help="only losses; no step is timed behind a link")
    parser.add_argument("--jobs", type=int, default=1, help="runs trained at the same time")
    parser.add_argument("--out", type=Path, default=Path("runs/time_to_loss"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
