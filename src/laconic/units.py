"""Numbers with units, read and printed: sizes (25MiB), times (5ms), rates (100mbit), shares (1%).

    size   B, kB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024)  -> bytes
    time   ns, us, ms, s, min, h                                                   -> seconds
    rate   bit, kbit, mbit, gbit, tbit (per second; "bps" and "/s" are accepted)    -> bits per second
    share  %                                                                       -> a fraction

A bare number is taken in the base unit.
"""

from __future__ import annotations

import math
import re
from typing import Literal

from laconic.errors import InvalidSetting, one_line

Dimension = Literal["size", "time", "rate", "share", "number"]

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4

_UNITS: dict[str, tuple[Dimension, float]] = {
    "b": ("size", 1),
    "kb": ("size", 1e3),
    "mb": ("size", 1e6),
    "gb": ("size", 1e9),
    "tb": ("size", 1e12),
    "kib": ("size", KIB),
    "mib": ("size", MIB),
    "gib": ("size", GIB),
    "tib": ("size", TIB),
    "ns": ("time", 1e-9),
    "us": ("time", 1e-6),
    "ms": ("time", 1e-3),
    "s": ("time", 1),
    "min": ("time", 60),
    "h": ("time", 3600),
    "bit": ("rate", 1),
    "kbit": ("rate", 1e3),
    "mbit": ("rate", 1e6),
    "gbit": ("rate", 1e9),
    "tbit": ("rate", 1e12),
    "%": ("share", 0.01),
}
_EXAMPLES: dict[Dimension, str] = {
    "size": "a size such as 25MiB",
    "time": "a time such as 5ms",
    "rate": "a rate such as 100mbit",
    "share": "a share such as 0.01 or 1%",
    "number": "a number",
}
_QUANTITY = re.compile(r"([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z%/]*)", re.IGNORECASE)


def parse_quantity(text: str, dimension: Dimension, where: str) -> float:
    """Read `text` as a quantity of `dimension`, in its base unit; `where` names the setting in errors."""
    expected = _EXAMPLES[dimension]
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise InvalidSetting(f'{where} must be {expected}, got "{one_line(text, 60)}".')
    unit = match[2].lower()
    if dimension == "rate":
        unit = unit.removesuffix("/s")
        unit = f"{unit[:-3]}bit" if unit.endswith("bps") else unit
    value = float(match[1].replace("_", ""))
    if unit:
        kind, factor = _UNITS.get(unit, (None, 1.0))
        if kind != dimension:
            raise InvalidSetting(f'{where} must be {expected}, got "{one_line(text, 60)}".')
        # 0.3 * 10**-3 style products pick up rounding; dividing by the inverse keeps 5ms == 0.005.
        value = value * factor if factor >= 1 else value / round(1 / factor)
    if not math.isfinite(value):
        raise InvalidSetting(f'{where} must be finite, got "{one_line(text, 60)}".')
    return value


def format_size(num_bytes: int) -> str:
    """The shortest exact spelling of a size, readable back by `parse_quantity`."""
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return f"{num_bytes}B"


def format_time(seconds: float) -> str:
    """A spelling of a time that reads back to exactly the same number."""
    for unit, per_second in (("ms", 1_000), ("us", 1_000_000)):
        if 0 < abs(seconds) < 1:
            scaled = seconds * per_second
            if scaled == int(scaled) and int(scaled) / per_second == seconds:
                return f"{int(scaled)}{unit}"
    return f"{int(seconds)}s" if seconds == int(seconds) else f"{seconds!r}s"


def format_rate(bits_per_second: float) -> str:
    """A spelling of a rate that reads back to exactly the same number."""
    for unit, factor in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        if bits_per_second >= factor and bits_per_second % factor == 0:
            return f"{int(bits_per_second // factor)}{unit}"
    return f"{bits_per_second!r}bit"


def human_bytes(num_bytes: float) -> str:
    """A size for people: 19.1 MiB. Rounded, so never for reading back."""
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def human_seconds(seconds: float) -> str:
    """A duration for people: 12.3 ms."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= factor:
            return f"{seconds / factor:.1f} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def human_count(number: float) -> str:
    """A number of parameters for people: 354.9M, 6.7B. Rounded, so never for reading back."""
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:.4g}{unit}"
    return f"{number:.0f}"


def human_factor(number: float, digits: int = 3) -> str:
    """A factor for people: 1.43, 204, 2,040; never 2.04e+03. Rounded, so never for reading back."""
    text = f"{number:.{digits}g}"
    return f"{float(text):,.0f}" if "e+" in text else text


def human_rate(bits_per_second: float) -> str:
    """A rate for people: 3.1 Gbit/s. Rounded, so never for reading back."""
    for unit, factor in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits_per_second >= factor:
            return f"{bits_per_second / factor:.3g} {unit}"
    return f"{bits_per_second:.0f} bit/s"


def human_duration(seconds: float) -> str:
    """A long time for people: 42 s, 4.3 min, 5.2 h, 3.4 days."""
    for unit, factor in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * factor:
            return f"{seconds / factor:,.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else human_seconds(seconds)
