"""From curves and step times: when a strategy has the loss that DDP ends with, and the sentence about it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.time_to_loss.curves import Curve, Kept, Run
from benchmarks.time_to_loss.step_times import DDP, first_of, seconds_until, steady_of


@dataclass(frozen=True)
class Line:
    """One strategy behind one link."""

    link: str
    strategy: str
    rate: float
    """The learning rate of the grid with which the first seed's final loss is lowest."""
    steps: int
    """Of the shortest run whose final loss is DDP's, or of the longest."""
    final: tuple[float, ...]
    """Final losses, by seed."""
    gap: float
    """Mean of the final loss as against DDP's with the same seed, as a share."""
    gap_spread: float
    step_s: float
    fewer_bytes: float
    sooner: tuple[float, ...]
    """By how much sooner each seed had DDP's final loss of that seed; empty where one never had."""

    @property
    def change(self) -> str:
        """The gap, with its spread where there are several seeds."""
        return f"{self.gap:+7.2%} {f'(+-{self.gap_spread:.2%})' if len(self.final) > 1 else '':10}"

    def text(self) -> str:
        """One row of the table."""
        sooner = "not within these steps"
        if self.sooner:
            sooner = f"{statistics.median(self.sooner):5.2f}x ({min(self.sooner):.2f}..{max(self.sooner):.2f})"
        return (
            f"{self.link:9} {self.strategy:62} {self.rate:7.4f} {self.steps:6} "
            f"{statistics.fmean(self.final):8.4f} {self.change} "
            f"{1e3 * self.step_s:9.1f} {self.fewer_bytes:8.1f}x  {sooner}"
        )


HEAD = (
    f"{'link':9} {'strategy':62} {'rate':>7} {'steps':>6} {'loss':>8} {'change':>7} {'':10} {'ms/step':>9} "
    f"{'fewer':>9}  DDP's loss sooner"
)


@dataclass(frozen=True)
class Question:
    """What was trained, for which there are curves."""

    size: str
    batch: int
    steps: int
    lengths: tuple[float, ...]
    rates: tuple[float, ...]
    seeds: int

    def trials(self, strategy: str) -> list[Run]:
        """The first seed with every rate; DDP is not trained for longer."""
        lengths = (1.0,) if strategy == "ddp" else self.lengths
        return [self._run(strategy, length, rate, 0) for length in lengths for rate in self.rates]

    def runs(self, kept: Kept, strategy: str) -> list[Run]:
        """All seeds with the rate that was best for the first."""
        lengths = (1.0,) if strategy == "ddp" else self.lengths
        return [run for length in lengths for run in self._best(kept, strategy, length)]

    def best(self, kept: Kept, strategy: str, length: float) -> list[Curve]:
        """By seed, with the rate of the grid that was best for the first."""
        return [kept[run] for run in self._best(kept, strategy, length)]

    def _best(self, kept: Kept, strategy: str, length: float) -> list[Run]:
        tried = [self._run(strategy, length, rate, 0) for rate in self.rates]
        rate = min(tried, key=lambda run: kept[run].losses[-1]).rate
        return [self._run(strategy, length, rate, seed) for seed in range(self.seeds)]

    def _run(self, strategy: str, length: float, rate: float, seed: int) -> Run:
        return Run(strategy, self.size, round(self.steps * length), rate, seed, self.batch)


def lines(
    question: Question,
    kept: Kept,
    strategies: Sequence[str],
    times_s: Mapping[tuple[str, str], float],
    links: Sequence[str],
) -> list[Line]:
    """DDP first, then every strategy, for each link."""
    plain = question.best(kept, "ddp", 1.0)
    targets = [curve.losses[-1] for curve in plain]
    found: list[Line] = []
    for link in links:
        ddp_s = times_s[link, DDP]
        needed = [ddp_s * question.steps] * question.seeds
        found.append(_line(link, DDP, plain, plain, step_s=ddp_s, needed_s=needed, ddp_s=ddp_s))
        for strategy in strategies:
            steady_s = times_s[link, steady_of(strategy)]
            first = first_of(strategy)
            first_s = times_s[link, first] if first else None
            for length in question.lengths:
                curves = question.best(kept, strategy, length)
                reached = [_reached(curve, target) for curve, target in zip(curves, targets, strict=True)]
                if all(step is not None for step in reached):
                    break
            needed = [
                seconds_until(strategy, step, curves[0].run.steps, steady_s, first_s)
                for step in reached
                if step is not None
            ]
            average_s = seconds_until(strategy, curves[0].run.steps, curves[0].run.steps, steady_s, first_s)
            average_s /= curves[0].run.steps
            enough = needed if len(needed) == question.seeds else []
            found.append(_line(link, strategy, curves, plain, step_s=average_s, needed_s=enough, ddp_s=ddp_s))
    return found


def _line(
    link: str,
    strategy: str,
    curves: Sequence[Curve],
    plain: Sequence[Curve],
    *,
    step_s: float,
    needed_s: Sequence[float],
    ddp_s: float,
) -> Line:
    gaps = [one.losses[-1] / other.losses[-1] - 1 for one, other in zip(curves, plain, strict=True)]
    per_step = curves[0].sent_bytes / curves[0].run.steps
    return Line(
        link,
        strategy,
        curves[0].run.rate,
        curves[0].run.steps,
        tuple(curve.losses[-1] for curve in curves),
        statistics.fmean(gaps),
        statistics.stdev(gaps) if len(gaps) > 1 else 0.0,
        step_s,
        plain[0].sent_bytes / plain[0].run.steps / per_step,
        tuple(ddp_s * plain[0].run.steps / needed for needed in needed_s),
    )


LOSS_HEAD = f"{'strategy':62} {'rate':>7} {'steps':>6} {'loss':>8} {'change':>7} {'':10} {'fewer':>9}  by seed"


def loss_lines(question: Question, kept: Kept, strategies: Sequence[str]) -> list[str]:
    """Final losses alone, DDP's first: what each strategy costs, whatever the link."""
    plain = question.best(kept, "ddp", 1.0)
    found: list[str] = []
    for strategy in dict.fromkeys(("ddp", *strategies)):
        curves = question.best(kept, strategy, question.lengths[0])
        line = _line("", strategy, curves, plain, step_s=0.0, needed_s=[], ddp_s=0.0)
        by_seed = " ".join(f"{loss:.4f}" for loss in line.final)
        found.append(
            f"{line.strategy:62} {line.rate:7.4f} {line.steps:6} {statistics.fmean(line.final):8.4f} {line.change} "
            f"{line.fewer_bytes:8.1f}x  {by_seed}"
        )
    return found


def _reached(curve: Curve, target: float) -> int | None:
    """The first step at which the loss was not above the target."""
    return next((step for step, loss in zip(curve.steps, curve.losses, strict=True) if loss <= target), None)


def sentence(link: str, of_link: Sequence[Line]) -> str:
    """What to use behind a link, or that nothing here is better."""
    better = [line for line in of_link[1:] if line.sooner and min(line.sooner) > 1.0]
    if not better:
        return f"On {link} nothing here has torch DDP's loss sooner than torch DDP."
    best = max(better, key=lambda line: statistics.median(line.sooner))
    least = max(better, key=lambda line: line.fewer_bytes)
    text = (
        f"On {link} {best.strategy} has torch DDP's loss {statistics.median(best.sooner):.1f} times sooner "
        f"({min(best.sooner):.1f} to {max(best.sooner):.1f} over {len(best.sooner)} seeds)"
    )
    return f"{text}; {least.strategy} sends {least.fewer_bytes:.0f} times fewer bytes until then, per step."
