"""What can be typed after `laconic list`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Show every method on each of the four axes with its settings, and the presets."""

    json: bool = False
    """Print JSON instead of tables."""
