"""Reads JSON strictly: every function returns a value of its type, or raises with the position of the wrong one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from laconic.errors import UsageError, did_you_mean, one_line


def parse(text: str, what: str) -> object:
    """The value of a document; no key may stand twice in one object. `what` names it in errors."""

    def without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
        table = dict(pairs)
        if len(table) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise UsageError(f'{what}: the key "{one_line(twice, 40)}" appears twice in one object. Remove one.')
        return table

    try:
        return json.loads(text, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as exc:
        raise UsageError(f"{what} cannot be read: {one_line(exc)}.") from exc


def read_object(
    value: object, where: str, *, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> Mapping[str, object]:
    """An object with all required keys, and no others except the optional ones."""
    if not isinstance(value, dict):
        raise UsageError(f"{where} must be an object {{...}}, got {shown(value)}.")
    known = (*required, *optional)
    for key in value:
        if key not in known:
            raise UsageError(f'{where}: there is no key "{one_line(key, 40)}". {did_you_mean(key, known)}')
    for key in required:
        if key not in value:
            raise UsageError(f'{where}: "{key}" is missing. Needed: {", ".join(required)}.')
    return value


def read_list(value: object, where: str, *, of: str) -> list[object]:
    """A list; `of` describes its elements in errors."""
    if not isinstance(value, list):
        raise UsageError(f"{where} must be a list of {of}, got {shown(value)}.")
    return value


def read_text(value: object, where: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise UsageError(f"{where} must be text in quotes, got {shown(value)}.")
    return value


def read_whole(value: object, where: str) -> int:
    """A whole number, written without a decimal point."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{where} must be a whole number, got {shown(value)}.")
    return value


def read_seconds(value: object, where: str) -> float:
    """A number of any size."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{where} must be a time in seconds such as 0.002, got {shown(value)}.")
    try:
        return float(value)
    except OverflowError:
        return math.inf  # refused later, like any other time that is too long


def shown(value: object) -> str:
    """A value as an error quotes it."""
    return one_line(json.dumps(value), 60)
