"""The options of `laconic list`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Show the methods of each axis and the presets; with words or a family, only matching ones, with all settings."""

    words: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[WORD ...]")] = ()
    """Only methods and presets that have all of these words somewhere in their description."""
    family: Annotated[str, tyro.conf.arg(metavar="NAME")] = ""
    """Only methods of this family, such as sparsification, or of this axis."""
    json: bool = False
    """Print JSON instead of tables."""
