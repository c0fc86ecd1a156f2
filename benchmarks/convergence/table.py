"""Results as lines for people and as JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.convergence.recipe import Recipe
from benchmarks.convergence.rows import Row
from benchmarks.convergence.training import Outcome

WANTED = 0.02
"""How far above the uncompressed loss a method may end."""


@dataclass(frozen=True)
class Result:
    """One row on one task, beside the same training without compression; the mean where there are several seeds."""

    task: str
    row: Row
    recipe: Recipe
    outcomes: Sequence[Outcome]
    """One for each seed it was trained with."""
    plains: Sequence[Outcome]
    """No compression with the same seeds."""

    @property
    def outcome(self) -> Outcome:
        """The mean of all seeds."""
        return _mean(self.outcomes)

    @property
    def plain(self) -> Outcome:
        """The mean of all seeds."""
        return _mean(self.plains)

    @property
    def change(self) -> float:
        """Of the loss, relative to no compression; infinite if it is not a number."""
        return self.outcome.loss / self.plain.loss - 1 if math.isfinite(self.outcome.loss) else math.inf

    @property
    def misses(self) -> bool:
        """Whether it ends too far above no compression."""
        return self.change > WANTED

    def line(self) -> str:
        """A line of the table."""
        change = "diverged" if math.isinf(self.change) else f"{self.change:+.1%}"
        sent = self.outcome.sent_bytes
        ratio = self.plain.sent_bytes / sent if sent else math.inf  # a run may be over before its first round
        return (
            f"{self.task:6} {self.row.title:58} {self.outcome.loss:7.4f} {change:>8} {'*' if self.misses else ' '}"
            f" {_accuracy(self.outcome)} {ratio:7.1f}x  {self.recipe}{_seeds(self.outcomes)}{self._of_changes()}"
        )

    def _of_changes(self) -> str:
        """The standard deviation of the changes of single seeds, where every seed was trained."""
        if len(self.outcomes) < 2 or len(self.outcomes) != len(self.plains):
            return ""
        changes = [one.loss / plain.loss for one, plain in zip(self.outcomes, self.plains, strict=True)]
        return f", of changes {statistics.stdev(changes):.1%}" if all(map(math.isfinite, changes)) else ""

    def as_json(self) -> dict[str, object]:
        """Everything, with null for what is not finite."""
        outcome = asdict(self.outcome)
        found: dict[str, object] = {
            "task": self.task,
            "group": self.row.group,
            "method": self.row.method,
            "strategy": str(self.row.strategy),
            "recipe": str(self.recipe),
            "change": self.change,
            "misses": self.misses,
            "losses": [None if not math.isfinite(one.loss) else one.loss for one in self.outcomes],
            "accuracies": [one.accuracy for one in self.outcomes],
            "plain_loss": self.plain.loss,
            "plain_accuracy": self.plain.accuracy,
            **outcome,
        }
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in found.items()
        }


HEADER = f"{'task':6} {'compression':58} {'loss':>7} {'change':>8}   {'right':>6} {'fewer':>8}  optimizer"


def plain_line(task: str, recipe: Recipe, outcomes: Sequence[Outcome], *, mean: bool = False) -> str:
    """No compression: the loss of the first seed or the mean of all, and how far those of several seeds are apart."""
    shown = _mean(outcomes) if mean else outcomes[0]
    start = f"{task:6} {'none':58} {shown.loss:7.4f} {'':8}   {_accuracy(shown)} {1:7.1f}x  {recipe}"
    return start + _seeds(outcomes)


def _seeds(outcomes: Sequence[Outcome]) -> str:
    """The loss of each seed, and the standard deviations of loss and accuracy, where there are several."""
    if len(outcomes) < 2:
        return ""
    losses = [outcome.loss for outcome in outcomes]
    text = f"  seeds: {', '.join(f'{loss:.4f}' for loss in losses)}"
    if all(map(math.isfinite, losses)):
        text += f", deviation {statistics.stdev(losses) / statistics.fmean(losses):.1%}"
    right = [outcome.accuracy for outcome in outcomes if outcome.accuracy is not None]
    return text + (f", of right {statistics.stdev(right):.1%}" if len(right) > 1 else "")


def _mean(outcomes: Sequence[Outcome]) -> Outcome:
    right = [outcome.accuracy for outcome in outcomes if outcome.accuracy is not None]
    return Outcome(
        statistics.fmean(outcome.loss for outcome in outcomes),
        statistics.fmean(right) if right else None,
        statistics.fmean(outcome.training_loss for outcome in outcomes),
        round(statistics.fmean(outcome.sent_bytes for outcome in outcomes)),
        sum(outcome.seconds for outcome in outcomes),
    )


def _accuracy(outcome: Outcome) -> str:
    return " " * 6 if outcome.accuracy is None else f"{outcome.accuracy:6.1%}"
