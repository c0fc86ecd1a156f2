"""A strategy as a TOML table.

    [strategy]
    synchronization = "bsp"

    [strategy.compression]
    name = "fp16"
    with = ["error_feedback"]          # wrappers, from the inside out: text, or tables like this one

    [strategy.scheduling]
    name = "fusion"
    bytes = "25MiB"                    # or 26214400

A setting that is itself a method is text or a table with a name, as an axis is.

Each axis is text or a table; axes left off take what the synchronization declares (`partners`), else the defaults.
A file may hold the table itself or a table [strategy].
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from typing import cast

from laconic.errors import SyntaxProblem, UnknownName, did_you_mean, one_line
from laconic.settings import Method, found


def read_table(text: str, axes: Sequence[str]) -> Mapping[str, object]:
    """The strategy table of a TOML document."""
    try:
        document = tomllib.loads(text)
    # tomllib lets a few others through on hostile input: deep nesting, huge integers, impossible dates.
    except (tomllib.TOMLDecodeError, RecursionError, ValueError, OverflowError) as exc:
        raise SyntaxProblem(f"strategy TOML cannot be read: {one_line(exc)}.") from exc
    inner = document.get("strategy", document)
    for axis in axes:
        if inner is not document and axis in document:
            raise SyntaxProblem(f"strategy TOML: {axis} stands outside [strategy]; move it into that table.")
    if not isinstance(inner, Mapping):
        raise SyntaxProblem(f"strategy TOML: [strategy] must be a table, got {found(inner)}.")
    if not inner:
        raise SyntaxProblem('strategy TOML: the table is empty. Write at least synchronization = "bsp".')
    return cast(Mapping[str, object], inner)


def check_axes(table: Mapping[str, object], axes: Sequence[str]) -> None:
    """Refuse keys that are no axis."""
    for key in table:
        if key not in axes:
            raise UnknownName(f'strategy TOML: there is no axis "{one_line(key, 40)}". {did_you_mean(key, axes)}')


def read_method(axis: str, value: object) -> tuple[str, dict[str, object], list[object]]:
    """Name, settings and wrappers of an axis given as a table."""
    if not isinstance(value, Mapping):
        raise SyntaxProblem(f"strategy TOML: {axis} must be text or a table with a name, got {found(value)}.")
    settings: dict[str, object] = dict(value)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise SyntaxProblem(f'strategy TOML: {axis} needs name = "..." (text), got {found(name)}.')
    wrappers = settings.pop("with", [])
    if not isinstance(wrappers, list):
        raise SyntaxProblem(f"strategy TOML: {axis}.with must be a list, got {found(wrappers)}.")
    return name, settings, wrappers


def write_value(value: object) -> str:
    """A setting as a TOML value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(write_value, value))}]"
    if isinstance(value, Method):
        entries = {"name": value.name, **value.settings()}
        return f"{{{', '.join(f'{key} = {write_value(entry)}' for key, entry in entries.items())}}}"
    return repr(value)
