"""What `laconic COMMAND --help` shows of each option: its text as one paragraph, and its default if it has one."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from typing import Annotated, get_type_hints

import tyro

_NO_DEFAULT = ("None", "False", "", "''")
"""As tyro writes them: the text of the option says what happens without it, and a flag is off."""


def prepare(arguments: type) -> None:
    """Annotate the options of a command, a dataclass, with their texts and defaults as tyro should show them."""
    hints = get_type_hints(arguments, include_extras=True)
    texts = _texts(arguments)
    for field in dataclasses.fields(arguments):
        kind = hints[field.name]
        repeats = tyro.conf.UseAppendAction in getattr(kind, "__metadata__", ())
        shown = tyro.conf.arg(help=texts.get(field.name), help_behavior_hint=_repeats if repeats else _default)
        arguments.__annotations__[field.name] = Annotated[kind, shown]


def _default(label: str) -> str:
    return "" if label in _NO_DEFAULT else f"(default: {label})"


def _repeats(label: str) -> str:
    return "(repeatable)"


def _texts(arguments: type) -> dict[str, str]:
    """The string below each field in the source of the class, in one line; none where there is no source."""
    try:
        source = inspect.getsource(arguments)
    except OSError:
        return {}
    (parsed,) = ast.parse(source).body
    assert isinstance(parsed, ast.ClassDef)
    texts: dict[str, str] = {}
    for field, below in zip(parsed.body, parsed.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(below, ast.Expr), f"{field.target.id} has no text below it"
            texts[field.target.id] = " ".join(ast.literal_eval(below.value).split())
    return texts
