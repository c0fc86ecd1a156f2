"""Typos in strategy text, found before torch is imported.

`Strategy.parse` finds them too, with the same messages, but needs every method's class for it. Other errors -
a value out of range, parts that do not fit together - are left to `Strategy.parse`.
"""

from __future__ import annotations

from laconic.cli.catalogue import Catalogue, MethodEntry, has_plugins, stored
from laconic.errors import UsageError, unknown_method, unknown_setting, unknown_strategy
from laconic.grammar import Call, parse_text


def check_names(text: str) -> None:
    """Raise for text that cannot be read, and for a method or setting that does not exist."""
    if text.strip() in ("/", "+"):
        raise UsageError(
            f'"{text.strip()}" alone is no strategy. Put a strategy with spaces in quotes: "bsp / gossip".'
        )
    if text.endswith(".toml") or has_plugins():
        return
    found = stored()
    presets = [preset["name"] for preset in found["presets"]]
    if text.strip() in presets:
        return
    axes = parse_text(text)
    first, alone = axes[0][0].name, len(axes) == 1
    synchronizations = _by_name(found, "synchronization")
    if len(axes) > len(found["axes"]) or (first in presets and first not in synchronizations):
        return
    if alone and first not in synchronizations:
        if any(first in _by_name(found, axis) for axis in found["axes"]):
            return
        raise unknown_strategy(first, presets, synchronizations)
    for axis, calls in zip(found["axes"], axes, strict=False):
        for call in calls:
            _check_call(axis, call, _by_name(found, axis))


def _by_name(found: Catalogue, axis: str) -> dict[str, MethodEntry]:
    return {method["name"]: method for method in found["axes"][axis]}


def _check_call(axis: str, call: Call, known: dict[str, MethodEntry]) -> None:
    if call.name not in known:
        raise unknown_method(axis, call.name, known)
    settings = {setting["name"]: setting for setting in known[call.name]["settings"]}
    order = list(settings)
    for position, (key, value) in enumerate(call.arguments):
        if key is None:
            if position >= len(order):
                return
            key = order[position]
        if key not in settings:
            raise unknown_setting(axis, call.name, key, order)
        if settings[key]["kind"] == "method" and isinstance(value, Call):
            _check_call(axis, value, known)
