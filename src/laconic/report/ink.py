"""Colours, symbols and short names: how a strategy, a policy or a worker looks in all figures of a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

NUM_COLOURS = 9
"""Colours --s0, --s1, ... in page.css; --ddp is torch DDP's."""
SYMBOLS = ("square", "diamond", "triangle-up", "triangle-down", "cross", "x", "pentagon", "star", "hexagon")
_NAME_LIMIT = 30


@dataclass(frozen=True)
class Ink:
    """How one strategy looks in every figure and table."""

    text: str
    name: str
    """Short and unique; the full text is shown on hover."""
    colour: str
    symbol: str


def looks(names: Mapping[str, str], ddp: str) -> dict[str, Ink]:
    """One look per strategy, by its full text; names: by full text. The strategy ddp is grey wherever it is drawn."""
    found: dict[str, Ink] = {}
    taken: set[str] = set()
    for text, name in names.items():
        short = _unlike(_shortened(name), taken)
        taken.add(short)
        if text == ddp:
            found[text] = Ink(text, short, "ddp", "circle")
            continue
        number = len(found) - (ddp in found)
        # Beyond nine strategies colours come again, then with other symbols.
        symbol = SYMBOLS[(number + number // NUM_COLOURS) % len(SYMBOLS)]
        found[text] = Ink(text, short, f"s{number % NUM_COLOURS}", symbol)
    return found


def _shortened(name: str) -> str:
    """At most _NAME_LIMIT letters; both ends stay, as strategies differ there."""
    if len(name) <= _NAME_LIMIT:
        return name
    tail = _NAME_LIMIT // 3
    return f"{name[: _NAME_LIMIT - tail - 1].rstrip()}…{name[-tail:].lstrip()}"


def _unlike(name: str, taken: set[str]) -> str:
    candidate, number = name, 2
    while candidate in taken:
        candidate, number = f"{name} #{number}", number + 1
    return candidate
