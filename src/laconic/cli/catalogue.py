"""Every method and preset in words, known without torch: for `laconic list`, and to find typos in names.

torch takes seconds to import, and the classes of the methods need it. So the description of laconic's own methods is
kept in catalogue.json, which `make catalogue` writes and a test compares with the classes. Where another package has
installed methods, the classes are asked instead.
"""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from pathlib import Path
from typing import TypedDict

PATH = Path(__file__).with_name("catalogue.json")
_GROUP = "laconic."


class SettingEntry(TypedDict):
    """One setting of a method."""

    name: str
    kind: str
    default: bool | int | float | str
    default_text: str
    allowed: str
    help: str


class MethodEntry(TypedDict, total=False):
    """One method; which keys there are depends on its axis."""

    name: str
    family: str
    summary: str
    good_for: str
    wrapper: bool
    partners: dict[str, str]
    lossless: bool | None
    unbiased: bool | None
    wants_error_feedback: bool | None
    keeps_residual: bool | None
    ratio: float | None
    exact: bool | None
    loss_gap: float | None
    loss_deviation: float | None
    settings: list[SettingEntry]


class PresetEntry(TypedDict):
    """One preset."""

    name: str
    strategy: str
    what: str
    loss: str


class Catalogue(TypedDict):
    """The document that `laconic list --json` prints; laconic/cli/list.py describes its keys."""

    axes: dict[str, list[MethodEntry]]
    questions: dict[str, str]
    presets: list[PresetEntry]
    loss: str


def catalogue() -> Catalogue:
    """The methods and presets that can be used on this machine."""
    if has_plugins():
        from laconic.cli.method_facts import describe

        return describe()
    return stored()


def stored() -> Catalogue:
    """Laconic's own methods and presets."""
    document: Catalogue = json.loads(PATH.read_text(encoding="utf-8"))
    return document


def has_plugins() -> bool:
    """Whether another package has installed methods; their names are known only when they are loaded."""
    return any(group.startswith(_GROUP) for group in entry_points().groups)
