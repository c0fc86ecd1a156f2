"""The result of a check, and of all checks of one strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["passed", "failed", "not applicable"]
Where = Literal["threads", "processes"]
"""Whether the ranks were threads of one process, or processes that communicate over Gloo."""


@dataclass(frozen=True)
class Outcome:
    """The verdict of one check, and the observations, with figures."""

    verdict: Verdict
    words: str


def passed(words: str) -> Outcome:
    """The promise was kept."""
    return Outcome("passed", words)


def failed(words: str) -> Outcome:
    """The promise was broken, or nothing could be observed."""
    return Outcome("failed", words)


def not_applicable(words: str) -> Outcome:
    """The strategy promises nothing of the kind."""
    return Outcome("not applicable", words)


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All checks of one strategy with one number of workers."""

    strategy: str
    workers: int
    where: Where
    outcomes: dict[str, Outcome]
    """Results by the name of the check, in the order in which they ran."""
    seconds: float

    @property
    def failures(self) -> dict[str, str]:
        """The checks that failed, with their observations."""
        return {name: outcome.words for name, outcome in self.outcomes.items() if outcome.verdict == "failed"}

    def as_json(self) -> dict[str, object]:
        """Plain containers."""
        return {
            "strategy": self.strategy,
            "workers": self.workers,
            "where": self.where,
            "passed": not self.failures,
            "seconds": round(self.seconds, 3),
            "checks": [
                {"check": name, "verdict": outcome.verdict, "words": outcome.words}
                for name, outcome in self.outcomes.items()
            ],
        }
