"""Checks of the names, counts and times of a workload."""

from __future__ import annotations

from laconic.errors import UsageError, one_line

LONGEST_S = 86_400.0
"""A layer that computes for a day is a typing error: milliseconds written as seconds, say."""


def check_name(name: str, what: str) -> None:
    """Raise unless `name` is text that is not empty."""
    if not isinstance(name, str) or not name.strip():
        raise UsageError(f"{what} must be text that is not empty, got {one_line(repr(name), 60)}.")


def check_count(value: int, what: str, *, least: int) -> None:
    """Raise unless `value` is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{what} must be a whole number >= {least}, got {one_line(repr(value), 60)}.")


def check_time(time_s: float, what: str, *, most: float = LONGEST_S) -> None:
    """Raise unless `time_s` is between 0 and `most` seconds."""
    if not 0 <= time_s <= most:  # so, because it also refuses NaN
        raise UsageError(f"{what} must be between 0 and {most:g} seconds, got {time_s!r}. Times are in seconds.")
