"""Reads JSON into dataclasses: every value has the type of its field, or the error names the wrong key."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import Any, Literal, TypeVar

from laconic.errors import UsageError, one_line

_Record = TypeVar("_Record")
_MOST_LEVELS = 20
_LARGEST_WHOLE = 2**64
"""The largest count; a larger one may not fit into a float."""
_IN_WORDS: dict[object, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    types.NoneType: "null",
}


def record(kind: type[_Record], value: object, where: str) -> _Record:
    """An instance of the dataclass `kind`; `where` names the place in errors."""
    if not isinstance(value, dict):
        raise _wrong(value, where, "an object")
    hints = typing.get_type_hints(kind)
    fields = [field.name for field in dataclasses.fields(typing.cast("Any", kind))]
    for key in [*fields, *value]:
        if key not in value or key not in fields:
            problem = "is missing" if key in fields else "is not known"
            raise UsageError(f'{where}: the key "{one_line(key, 40)}" {problem}.')
    return kind(**{key: _typed(value[key], hints[key], f"{where}: {key}") for key in fields})


def plain(value: object, where: str, levels: int = _MOST_LEVELS) -> None:
    """Raise unless this is a JSON value that can be written on a page."""
    if not levels:
        raise UsageError(f"{where} is nested more than {_MOST_LEVELS} levels deep.")
    if isinstance(value, dict):
        for key, inner in value.items():
            plain(key, f"{where}: a key", levels)
            plain(inner, f"{where}: {one_line(key, 40)}", levels - 1)
    elif isinstance(value, list):
        for inner in value:
            plain(inner, where, levels - 1)
    else:
        _typed(value, str | int | float | bool | None, where)


def _typed(value: object, hint: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return record(typing.cast("type[Any]", hint), value, where)
    if origin in (list, tuple):
        if not isinstance(value, list):
            raise _wrong(value, where, "a list")
        inner = [_typed(item, arguments[0], f"{where}[{number}]") for number, item in enumerate(value)]
        return inner if origin is list else tuple(inner)
    alternatives = arguments if origin in (typing.Union, types.UnionType) else (hint,)
    for alternative in alternatives:
        if _fits(value, alternative):
            return float(typing.cast("float", value)) if alternative is float else value
    raise _wrong(value, where, " or ".join(map(_described, alternatives)))


def _fits(value: object, hint: Any) -> bool:
    if typing.get_origin(hint) is Literal:
        return isinstance(value, str) and value in typing.get_args(hint)
    if isinstance(value, bool) or value is None:
        return hint is type(value)
    if isinstance(value, str):
        return hint is str and _has_an_encoding(value)
    if isinstance(value, int):
        return hint in (int, float) and abs(value) <= _LARGEST_WHOLE
    return isinstance(value, hint)


def _has_an_encoding(text: str) -> bool:
    """Refuse unpaired surrogates, which JSON allows but UTF-8 does not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _described(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " or ".join(f'"{choice}"' for choice in typing.get_args(hint))
    return _IN_WORDS[hint]


def _wrong(value: object, where: str, wanted: str) -> UsageError:
    # Without its insides, which may be large or deep.
    shown = f"a {'list' if isinstance(value, list) else 'object'}"
    if not isinstance(value, dict | list):
        shown = one_line(json.dumps(value), 40)
    return UsageError(f"{where} must be {wanted}, got {shown}.")
