"""Checks of what a strategy promises, made by real steps: on threads of one process, and on processes."""

from laconic.experiments.verification.all_checks import CHECKS, verify_on_threads
from laconic.experiments.verification.matrix import Cell, cells
from laconic.experiments.verification.outcome import Findings, Outcome, Verdict, Where

__all__ = [
    "CHECKS",
    "Cell",
    "Findings",
    "Outcome",
    "Verdict",
    "Where",
    "cells",
    "verify_on_threads",
]
