"""Predictions of a table, corrected by the errors that were found for similar measured rows.

The logarithm of measured / predicted is taken to vary smoothly over configurations:

    residual(row) = log(measured / predicted), at most 1 and at least -1
    distance(a, b) = word * (number of different words) + count * sum of |log(count of a / count of b)|
    k(a, b)      = exp(-distance(a, b)); 0 between rows of different groups
    correction   = k(row, measured) (k(measured, measured) + noise * identity)^-1 residuals
    calibrated   = predicted * exp(correction)

This is the mean of a Gaussian process, also known as simple kriging. Several rows of one configuration count less than
rows of different ones. The further away the measured rows are, the smaller is the correction: one row at a distance of
1 corrects by 35% of its residual, one that differs in four words by 6%. Each column is corrected by itself, from the
rows that have its measurement.

Reference: Rasmussen & Williams 2006, "Gaussian processes for machine learning", equation 2.25.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from laconic.errors import ConfigurationError, UsageError
from laconic.simulator.reference.published import Likeness, PublishedTable
from laconic.simulator.reference.rows import Compared

_LARGEST = 1.0
"""The largest residual that counts: a factor of e; single measurements are wrong by more."""
_NEARBY = 1.0
"""The distance up to which a measured row is called similar."""
_MOST_MEASURED = 5000
"""The memory for the distances grows with the square of this number."""


@dataclass(frozen=True, kw_only=True)
class Smoothing:
    """The constants of the kernel; benchmarks/serving_calibration.py prints errors for these and for others."""

    word: float = 0.7
    """The distance that one different word makes."""
    count: float = 0.25
    """The distance that a ratio of e in one count makes."""
    noise: float = 0.05
    """The variance of a measurement, relative to that of the residuals."""


@dataclass(frozen=True)
class Calibrated:
    """One row with its corrected predictions, and their basis."""

    compared: Compared
    """With the corrected predictions."""
    uncalibrated: dict[str, float]
    """The predictions before, by measured column."""
    similar: dict[str, int]
    """By measured column, the number of rows with its measurement at a distance of at most 1: the same words, or one
    different one, and similar counts."""
    also_measured: bool
    """Whether a measured row is like this one in everything that counts: the prediction has seen its answer."""


def calibrated(
    table: PublishedTable,
    predicted: Sequence[Compared],
    measured: Sequence[Compared],
    smoothing: Smoothing | None = None,
) -> list[Calibrated]:
    """The predictions, corrected by the errors of the rows of `measured`, which have measurements."""
    _check(table, measured)
    known, asked = _likeness(table, measured), _likeness(table, predicted)
    smoothing = smoothing or Smoothing()
    between, among = _distances(asked, known, smoothing), _distances(known, known, smoothing)
    factors, similar = {}, {}
    for column in table.measured:
        rows = [index for index, row in enumerate(measured) if column in row.errors]
        similar[column] = (between[:, rows] <= _NEARBY).sum(axis=1)
        if rows:
            residuals = np.array([_residual(measured[index], column) for index in rows])
            kernel = np.exp(-among[np.ix_(rows, rows)]) + smoothing.noise * np.eye(len(rows))
            factors[column] = np.exp(np.exp(-between[:, rows]) @ np.linalg.solve(kernel, residuals))
    seen = (between == 0).any(axis=1)
    found = []
    for index, row in enumerate(predicted):
        corrected = {
            column: value * float(factors[column][index]) if column in factors else value
            for column, value in row.predicted.items()
        }
        errors = {column: corrected[column] / row.row.number(column) - 1 for column in row.errors}
        counts = {column: int(number[index]) for column, number in similar.items()}
        found.append(Calibrated(Compared(row.row, corrected, errors), row.predicted, counts, bool(seen[index])))
    return found


def _residual(row: Compared, column: str) -> float:
    # Not from the error, which is -1 to the last bit where a measurement is absurdly large.
    residual = math.log(row.row.number(column)) - math.log(row.predicted[column])
    return max(-_LARGEST, min(_LARGEST, residual))


def _check(table: PublishedTable, measured: Sequence[Compared]) -> None:
    if not measured:
        raise ConfigurationError(f"{table.name}: there is no measured row to calibrate on. Give at least one.")
    if len(measured) > _MOST_MEASURED:
        raise ConfigurationError(
            f"{table.name}: {len(measured)} measured rows are more than {_MOST_MEASURED}. Leave out those that "
            "resemble the predicted rows least."
        )
    for row in measured:
        if not row.errors:
            raise ConfigurationError(
                f"{row.row.where}: a row to calibrate on needs a measurement in the column "
                f"{' or '.join(table.measured)}. Fill it in, or leave the row out."
            )


def _likeness(table: PublishedTable, rows: Sequence[Compared]) -> list[Likeness]:
    found = [table.likeness(row.row) for row in rows]
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        raise UsageError(f"predictions of {table.name} cannot be calibrated; those of serving can.")
    return known


def _distances(some: Sequence[Likeness], others: Sequence[Likeness], smoothing: Smoothing) -> NDArray[np.float64]:
    """Of every row of `some` from every row of `others`; infinite between groups."""
    if not some:
        return np.zeros((0, len(others)))
    found = np.zeros((len(some), len(others)))
    for column in range(len(others[0].words)):
        here, there = (np.array([row.words[column] for row in rows]) for rows in (some, others))
        found += smoothing.word * (here[:, None] != there[None, :])
    for column in range(len(others[0].counts)):
        here, there = (np.log([row.counts[column] for row in rows]) for rows in (some, others))
        found += smoothing.count * np.abs(here[:, None] - there[None, :])
    here, there = (np.array([row.group for row in rows]) for rows in (some, others))
    found[here[:, None] != there[None, :]] = np.inf
    return found
