"""What a page needs to be one file that loads nothing: its data, its scripts, and a policy that allows only those."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files

from markupsafe import Markup

from laconic.report.figure_data import strict


def embedded_json(value: object) -> Markup:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(strict(value), separators=(",", ":"), allow_nan=False)
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)


def script_hash(script: str) -> str:
    """A script's name in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def resource(name: str) -> str:
    """A file of this package as text."""
    return files("laconic.report").joinpath(name).read_text(encoding="utf-8")
