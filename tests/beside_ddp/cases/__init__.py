"""Awkward models and loops, each run with torch's DDP and with laconic and compared bit for bit."""

from tests.beside_ddp.cases import accumulation, gradients, loops, models, precision, refusals, sessions, unused
from tests.beside_ddp.cases.contract import CASES, EQUAL, Case, compare, verdict

__all__ = [
    "CASES",
    "EQUAL",
    "Case",
    "accumulation",
    "compare",
    "gradients",
    "loops",
    "models",
    "precision",
    "refusals",
    "sessions",
    "unused",
    "verdict",
]
