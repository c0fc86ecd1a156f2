"""Checks of a strategy's promises with real steps: on threads of one process, and on processes."""

from laconic.experiments.verification.all_checks import CHECKS, verify_on_threads
from laconic.experiments.verification.at_once import verify_at_once
from laconic.experiments.verification.matrix import PLACES, Matrix, PairVerdict, matrix
from laconic.experiments.verification.outcome import Findings, Outcome, Verdict, Where

__all__ = [
    "CHECKS",
    "PLACES",
    "Findings",
    "Matrix",
    "Outcome",
    "PairVerdict",
    "Verdict",
    "Where",
    "matrix",
    "verify_at_once",
    "verify_on_threads",
]
