"""Does it still learn? Every method with its recommended wrapper beside no compression, at equal steps.

    python -m benchmarks.convergence [--tasks text images] [--only topk] [--groups compression gentler]
                                     [--steps 300] [--rate 0.003] [--seeds 3] [--images FILE.npz] [--jobs 1] [--json]

Four workers in one process train the tiny GPT on the standard library's source text with AdamW, and the tiny CNN on
images (scikit-learn's digits, or --images) with SGD and momentum. The learning rate rises for 5% of the steps and falls
to zero along a cosine, so that residuals have time to arrive. Optimizer, rate, schedule, weights and batches are the
same with and without compression; nothing is tuned for a method, and --rate changes the usual rate for all. Two methods
replace part of an optimizer and get another recipe, beside no compression with the equivalent one: dgc keeps the
momentum itself (SGD without, beside SGD with it), and signsgd gives directions, not gradients (AdamW on both tasks,
beside AdamW).

Printed is the loss on data never trained on, after the last step, its change as against no compression ("*": more
than 2% above), for images the share that is right, and how many times fewer bytes a worker sent. No compression runs
with several seeds, whose standard deviation says what is noise; methods run with the first seed alone.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from dataclasses import replace
from typing import TextIO

import torch

from benchmarks.convergence.pool import PooledTrainer, Subjects, processes
from benchmarks.convergence.recipe import Recipe
from benchmarks.convergence.rows import GROUPS, Row, given
from benchmarks.convergence.subjects import Subject
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
        rows = given(options.strategies) or _rows(options.groups, options.only, options.steps)
        found = [Subjects(name, options.seeds, options.images) for name in options.tasks]
        made = [_with_rate(wanted.make(), options.rate) for wanted in found]
        print(HEADER, file=lines, flush=True)
        if options.jobs == 1:
            for subject in made:
                _compare(Trainer(subject, options.steps, _progress), subject, rows, results, lines)
        else:
            with processes(options.jobs) as pool:
                trainers = [PooledTrainer(wanted, options.steps, pool) for wanted in found]
                for trainer, subject in zip(trainers, made, strict=True):
                    trainer.ask(_runs(subject.usual, options.seeds, rows))
                for trainer, subject in zip(trainers, made, strict=True):
                    _compare(trainer, subject, rows, results, lines)
    except LaconicError as exc:
        print(exc, file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("\nstopped; what was finished is above.", file=sys.stderr)
        status = 130
    if options.json and status != 2:
        print(json.dumps([result.as_json() for result in results], indent=2))
    return status


def _with_rate(subject: Subject, rate: float | None) -> Subject:
    return subject if rate is None else replace(subject, usual=replace(subject.usual, learning_rate=rate))


def _progress(subject: Subject, doing: str, step: int, steps: int) -> None:
    """A line about the step under way, for somebody who watches; a log gets a line per row."""
    if sys.stderr.isatty():
        end = "\r" if step < steps else "\r\033[K"
        print(f"{subject.name}: {doing}, step {step} of {steps}", end=end, file=sys.stderr, flush=True)


def _runs(usual: Recipe, seeds: int, rows: list[Row]) -> list[tuple[Strategy, Recipe, int]]:
    """Everything that _compare will want."""
    plain = Strategy()
    runs = [(plain, usual, seed) for seed in range(seeds)]
    for row in rows:
        runs += [(row.strategy, row.recipe or usual, 0), (plain, row.beside or usual, 0)]
    return runs


def _compare(
    trainer: Trainer | PooledTrainer, subject: Subject, rows: list[Row], results: list[Result], lines: TextIO
) -> None:
    """Train without compression with every seed, then every row with the first; a line for each."""
    task, usual = subject.name, subject.usual
    plain = [trainer.plain(usual, seed) for seed in range(len(subject.tasks))]
    print(plain_line(task, usual, plain), file=lines, flush=True)
    shown = {usual}
    for row in rows:
        recipe, beside = row.recipe or usual, row.beside or usual
        outcome = trainer.train(row.strategy, recipe, seed=0)
        if beside not in shown:
            shown.add(beside)
            print(plain_line(task, beside, [trainer.plain(beside, 0)]), file=lines, flush=True)
        results.append(Result(task, row, recipe, outcome, trainer.plain(beside, 0)))
        print(results[-1].line(), file=lines, flush=True)


def _rows(groups: list[str], only: list[str], steps: int) -> list[Row]:
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
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--only", nargs="+", default=[], metavar="METHOD", help="only rows of these methods")
    parser.add_argument("--strategies", nargs="+", default=[], metavar="STRATEGY", help="these instead of the groups")
    parser.add_argument("--steps", type=_at_least_one, default=300)
    parser.add_argument("--rate", type=_above_zero, help="the highest learning rate, instead of the usual one")
    parser.add_argument("--seeds", type=_at_least_one, default=3, help="of the runs without compression")
    parser.add_argument("--images", metavar="FILE.npz", help="instead of scikit-learn's digits")
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


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
