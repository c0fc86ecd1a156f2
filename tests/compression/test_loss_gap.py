"""What methods say about how well they train is what the benchmark printed, and their pages say it too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from laconic.compression import COMPRESSORS, Compressor, ErrorFeedback, TopK, Wrapper

DOCS = Path(__file__).resolve().parents[2] / "docs"
ALONE: list[Compressor] = [kind() for kind in COMPRESSORS if not issubclass(kind, Wrapper)]
LOSSY = [method for method in ALONE if not method.traits.lossless]


def printed() -> dict[str, tuple[str, str]]:
    """The change of the loss on text that each method's row shows, and the deviation of the changes of its seeds.

    Of several rows the first: its defaults.
    """
    page = (DOCS / "results" / "convergence.md").read_text(encoding="utf-8")
    table = page.partition("## Text")[2].partition("\n## ")[0]
    found: dict[str, tuple[str, str]] = {}
    row = r"^text +(\w+)(?: \+ error_feedback)? +[0-9.]+ +([-+][0-9.]+%) .* of changes ([0-9.]+%)$"
    for name, change, deviation in re.findall(row, table, re.MULTILINE):
        found.setdefault(name, (change.replace("-0.0%", "+0.0%"), deviation))
    return found


def pages() -> list[str]:
    """What documentation says about compressors."""
    return [path.read_text(encoding="utf-8") for path in (DOCS / "compression").glob("*.md")]


@pytest.mark.parametrize("method", LOSSY, ids=lambda method: method.name)
def test_a_lossy_method_declares_what_was_measured(method: Compressor) -> None:
    gap = method.traits.loss_gap
    if gap is None:
        assert method.name not in printed(), "declare what python -m benchmarks.convergence has printed"
        assert any(re.search(rf"`{method.name}[^`]*`[^\n]*not measured", page) for page in pages()), (
            "say so on its page"
        )
    else:
        spread = method.traits.loss_deviation
        assert spread is not None, "train it with --every-seed"
        assert (f"{gap:+.1%}", f"{spread:.1%}") == printed()[method.name]


@pytest.mark.parametrize(
    "method", [method for method in LOSSY if (method.traits.loss_gap or 0) > 0.02], ids=lambda m: m.name
)
def test_the_page_of_a_method_that_misses_says_by_how_much(method: Compressor) -> None:
    figure = f"{method.traits.loss_gap:+.1%}"
    assert any(re.search(rf"`{method.name}[^`]*`[^\n]*{re.escape(figure)}", page) for page in pages()), figure


def test_what_loses_nothing_has_no_gap() -> None:
    assert all(method.traits.loss_gap is None for method in ALONE if method.traits.lossless)
    assert ErrorFeedback(TopK()).traits.loss_gap is None, "it was measured for a method by itself"
