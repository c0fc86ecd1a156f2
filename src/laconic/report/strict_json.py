"""Values that JSON can hold."""

from __future__ import annotations

import math


def strict(value: object) -> object:
    """The value without NaN and infinities, which JSON does not have: a loss may have diverged."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: strict(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [strict(inner) for inner in value]
    return value
