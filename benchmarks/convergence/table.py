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
    """One row on one task, beside the same training without compression."""

    task: str
    row: Row
    recipe: Recipe
    outcome: Outcome
    plain: Outcome

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
            f" {_accuracy(self.outcome)} {ratio:7.1f}x  {self.recipe}"
        )

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
            "plain_loss": self.plain.loss,
            "plain_accuracy": self.plain.accuracy,
            **outcome,
        }
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in found.items()
        }


HEADER = f"{'task':6} {'compression':58} {'loss':>7} {'change':>8}   {'right':>6} {'fewer':>8}  optimizer"


def plain_line(task: str, recipe: Recipe, outcomes: Sequence[Outcome]) -> str:
    """No compression: the loss of the first seed, and how far those of several seeds are apart."""
    losses = [outcome.loss for outcome in outcomes]
    spread = statistics.stdev(losses) / statistics.fmean(losses) if len(losses) > 1 else None
    noise = "" if spread is None else f"  seeds: {', '.join(f'{loss:.4f}' for loss in losses)}, deviation {spread:.1%}"
    return f"{task:6} {'none':58} {losses[0]:7.4f} {'':8}   {_accuracy(outcomes[0])} {1:7.1f}x  {recipe}{noise}"


def _accuracy(outcome: Outcome) -> str:
    return " " * 6 if outcome.accuracy is None else f"{outcome.accuracy:6.1%}"
