"""The tables of `compare` and `replay`."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from tests.report.test_advice import DDP
from tests.report.test_results import RESULTS

from laconic.cli import contest_view


@pytest.mark.parametrize("width", [60, 80, 120])
def test_names_are_never_cut(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    monkeypatch.setattr(contest_view, "stdout_console", lambda: console)
    names = [f"bsp / all_reduce / int{bits}(block=256) + error_feedback / fusion(bytes=12MiB)" for bits in (4, 8)]
    narrow = replace(DDP, wire_bytes_per_step=1)
    rows = (narrow, *(replace(narrow, strategy=name, name=name) for name in names))
    for section in contest_view.tables(replace(RESULTS, rows=rows)):
        console.print(section)
    shown = console.file.getvalue()  # pyrefly: ignore[missing-attribute]
    assert "…" not in shown
    for name in names:
        assert all(word in shown for word in name.split())
    assert max(map(len, shown.splitlines())) <= width
