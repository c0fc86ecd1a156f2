"""Does it still learn? Every method with its recommended wrapper beside no compression, at equal steps.

    python -m benchmarks.convergence [--tasks text images] [--only topk] [--groups compression gentler]
                                     [--steps 300] [--rate 0.003] [--seeds 3] [--images FILE.npz] [--jobs 1] [--json]
    python -m benchmarks.convergence --skew "dirichlet(0.1)" --workers 8 --tasks images --images drawn

Four workers in one process, or --workers, train the tiny GPT on the standard library's source text with AdamW, and the
tiny CNN on images (scikit-learn's digits, or --images) with SGD and momentum. The learning rate rises for 5% of the
steps and falls to zero along a cosine, so that residuals have time to arrive. Optimizer, rate, schedule, weights and
batches are the same with and without compression; nothing is tuned for a method, and --rate and --momentum change the
usual ones for all. Two methods replace part of an optimizer and get another recipe, beside no compression with the
equivalent one: dgc keeps the momentum itself (SGD without, beside SGD with it), and signsgd gives directions, not
gradients (AdamW on both tasks, beside AdamW).

Printed is the loss on data never trained on, after the last step, its change as against no compression ("*": more
than 2% above), for images the share that is right, and how many times fewer bytes a worker sent. No compression runs
with several seeds, whose standard deviation says what is noise; methods run with the first seed alone, or with
--every-seed with all of them: printed then is the mean.

With --skew workers see different data, see skew.py: images are split by class, text by source file, and the rows are
the rules that differ in what they do about that, with every seed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TextIO

import torch

from benchmarks.convergence.pool import PooledTrainer, Subjects, processes
from benchmarks.convergence.recipe import Recipe
from benchmarks.convergence.rows import GROUPS, USUAL, Row, given
from benchmarks.convergence.skew import Skew
from benchmarks.convergence.subjects import WORKERS, Subject
from benchmarks.convergence.table import HEADER, Result, plain_line
from benchmarks.convergence.training import Trainer
from laconic import Strategy
from laconic.errors import LaconicError, LaconicWarning, UsageError, did_you_mean


def main() -> int:
    options = _options()
    results: list[Result] = []
    # With --json, standard output holds the document alone.
    lines = sys.stderr if options.json else sys.stdout
    # Several threads for each of four workers would get into each other's way.
    torch.set_num_threads(1)
    # A row without error feedback is there to be measured.
    warnings.simplefilter("ignore", LaconicWarning)
    status = 0
    try:
        skew = None if options.skew is None else Skew.parse(options.skew)
        groups = options.groups or (USUAL if skew is None else ["unlike"])
        rows = given(options.strategies) or _rows(groups, options.only, options.steps)
        seeds = range(options.seeds if options.every_seed or skew is not None else 1)
        found = [Subjects(name, options.seeds, options.images, skew, options.workers) for name in options.tasks]
        made = [_with_recipe(wanted.make(), options.rate, options.momentum) for wanted in found]
        print(HEADER, file=lines, flush=True)
        if options.jobs == 1:
            for subject in made:
                trainer = Trainer(subject, options.steps, _progress, options.workers)
                _compare(trainer, subject, rows, seeds, results=results, lines=lines)
        else:
            with processes(options.jobs) as pool:
                trainers = [PooledTrainer(wanted, options.steps, pool) for wanted in found]
                for trainer, subject in zip(trainers, made, strict=True):
                    trainer.ask(_runs(subject.usual, options.seeds, rows, seeds))
                for trainer, subject in zip(trainers, made, strict=True):
                    _compare(trainer, subject, rows, seeds, results=results, lines=lines)
    except LaconicError as exc:
        print(exc, file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("\nstopped; what was finished is above.", file=sys.stderr)
        status = 130
    if options.json and status != 2:
        print(json.dumps([result.as_json() for result in results], indent=2))
    return status


def _with_recipe(subject: Subject, rate: float | None, momentum: float | None) -> Subject:
    usual = subject.usual
    if rate is not None:
        usual = replace(usual, learning_rate=rate)
    if momentum is not None:
        if usual.optimizer != "sgd":
            raise UsageError(f"--momentum has no effect on {subject.name}, which AdamW trains. Leave it out.")
        usual = replace(usual, momentum=momentum)
    return replace(subject, usual=usual)


def _progress(subject: Subject, doing: str, step: int, steps: int) -> None:
    """A line about the current step, for somebody who watches; a log gets a line per row."""
    if sys.stderr.isatty():
        end = "\r" if step < steps else "\r\033[K"
        print(f"{subject.name}: {doing}, step {step} of {steps}", end=end, file=sys.stderr, flush=True)


def _runs(usual: Recipe, num_seeds: int, rows: list[Row], seeds: range) -> list[tuple[Strategy, Recipe, int]]:
    """Everything that _compare will want."""
    plain = Strategy()
    runs = [(plain, usual, seed) for seed in range(num_seeds)]
    for row in rows:
        for seed in seeds:
            runs += [(row.strategy, row.recipe or usual, seed), (plain, row.beside or usual, seed)]
    return runs


def _compare(
    trainer: Trainer | PooledTrainer,
    subject: Subject,
    rows: list[Row],
    seeds: range,
    *,
    results: list[Result],
    lines: TextIO,
) -> None:
    """Train without compression with every seed, then every row with `seeds`; a line for each."""
    task, usual, mean = subject.name, subject.usual, len(seeds) > 1
    plain = [trainer.plain(usual, seed) for seed in range(len(subject.tasks))]
    print(plain_line(task, usual, plain, mean=mean), file=lines, flush=True)
    shown = {usual}
    for row in rows:
        recipe, beside = row.recipe or usual, row.beside or usual
        outcomes = [trainer.train(row.strategy, recipe, seed) for seed in seeds]
        plains = [trainer.plain(beside, seed) for seed in seeds]
        if beside not in shown:
            shown.add(beside)
            print(plain_line(task, beside, plains, mean=mean), file=lines, flush=True)
        results.append(Result(task, row, recipe, outcomes, plains))
        print(results[-1].line(), file=lines, flush=True)


def _rows(groups: Sequence[str], only: list[str], steps: int) -> list[Row]:
    rows = [row for group in groups for row in GROUPS[group](steps)]
    known = list(dict.fromkeys(row.method for row in rows))
    for name in only:
        if name not in known:
            raise UsageError(f'there is no method "{name}" in {", ".join(groups)}. {did_you_mean(name, known)}')
    return [row for row in rows if not only or row.method in only]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tasks", nargs="+", choices=["text", "images"], default=["text", "images"])
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=[])
    parser.add_argument("--only", nargs="+", default=[], metavar="METHOD", help="only rows of these methods")
    parser.add_argument("--strategies", nargs="+", default=[], metavar="STRATEGY", help="these instead of the groups")
    parser.add_argument("--steps", type=_at_least_one, default=300)
    parser.add_argument("--rate", type=_above_zero, help="the highest learning rate, instead of the usual one")
    parser.add_argument("--momentum", type=_share, help="of SGD, instead of the usual one")
    parser.add_argument("--seeds", type=_at_least_one, default=3, help="of the runs without compression")
    parser.add_argument("--every-seed", action="store_true", help="train every row with every seed")
    parser.add_argument("--workers", type=_at_least_one, default=WORKERS)
    parser.add_argument("--skew", metavar="dirichlet(0.1)", help="give workers different data")
    parser.add_argument("--images", metavar="FILE.npz", help='instead of scikit-learn\'s digits; "drawn": drawn here')
    parser.add_argument("--jobs", type=_at_least_one, default=1, help="rows trained at the same time")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _above_zero(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number > 0, got {text}")
    return rate


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"must be a number >= 0 and < 1, got {text}")
    return share


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
