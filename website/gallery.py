"""The reports of the gallery, written again whenever the site is built, so that readers see today's reports."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from laconic.cli.dispatch import main

RUNS = Path(__file__).resolve().parent.parent / "docs" / "gallery"
"""Stored runs; a folder holds what `laconic compare` left, except for the page and the trace."""
SWEEP = (
    "simulate ddp ddp-bf16 powersgd diloco --workload bert-base --cluster ethernet-10g --workers 4..64 "
    "--bandwidth 1gbit,10gbit"
)


def write_reports(folder: Path) -> None:
    """Write the page of every stored run, and of one simulated sweep, into `folder`."""
    folder.mkdir(exist_ok=True)
    for run in sorted(path for path in RUNS.iterdir() if path.is_dir()):
        _laconic("report", str(run), "--output", str(folder / f"{run.name}.html"))
    _laconic(*SWEEP.split(), "--output", str(folder / "sweep.html"))


def _laconic(*words: str) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(list(words))
    assert code == 0, said.getvalue()
