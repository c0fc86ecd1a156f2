"""Makes a page one file that loads nothing: its data, its scripts, and a policy that allows only those."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from importlib.resources import files

import jinja2
from markupsafe import Markup

from laconic import __version__
from laconic.report.strict_json import strict

SHARED_SCRIPTS = ("units.js", "figures.js", "stage.js")
"""Parts of the figures of every page, each built on those before it."""


def render_page(
    name: str, drawing: Mapping[str, object], filters: Mapping[str, Callable[..., str]], values: Mapping[str, object]
) -> str:
    """The page of this name: NAME.html.jinja with these filters and values, and NAME.js, which draws the figures."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(resource),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters
    scripts = [plotly_script(), *map(resource, SHARED_SCRIPTS), resource(f"{name}.js")]
    return environment.get_template(f"{name}.html.jinja").render(
        **values,
        version=__version__,
        data=embedded_json(drawing),
        # Only these scripts may run, whatever a name or a message holds.
        script_hashes=Markup(" ".join(map(script_hash, scripts))),
        # Files of ours and of plotly, which are meant to be markup.
        style=Markup(resource("page.css")),
        scripts=list(map(Markup, scripts)),
    )


def embedded_json(value: object) -> Markup:
    """JSON that cannot end its enclosing element."""
    text = json.dumps(strict(value), separators=(",", ":"), allow_nan=False)
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)


def script_hash(script: str) -> str:
    """A script's name in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def plotly_script() -> str:
    """The part of plotly.js that draws curves and bars."""
    return resource("plotly/plotly-basic.min.js")


def resource(name: str) -> str:
    """A file of this package as text."""
    return files("laconic.report").joinpath(name).read_text(encoding="utf-8")
