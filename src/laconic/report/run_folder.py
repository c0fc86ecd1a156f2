"""The folder a run leaves behind.

runs/20261115-093000-compare/
    config.toml      complete: `laconic compare --config FILE` repeats the run
    env.json         the machine and the versions
    events.jsonl     what happened on every rank
    results.json     rows and curves
    trace.json       opens in Perfetto
    report.html      one offline page
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from laconic.core.event import Event, read_events
from laconic.errors import LaconicError, UsageError, one_line
from laconic.report import typed_json
from laconic.report.results import Results


class RunFolder:
    """Reads and writes the files of one run; a file that cannot be written raises an error that says why."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, name: str, path: str | Path | None = None) -> RunFolder:
        """Make an empty folder: `path`, or one under runs/ named after the time and `name`."""
        folder = Path(path) if path is not None else _fresh(Path("runs"), f"{time.strftime('%Y%m%d-%H%M%S')}-{name}")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} exists and is not an empty folder. Give a folder that is new or empty.")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise UsageError(f"cannot make the folder {folder}: {exc.strerror}.") from exc
        return cls(folder)

    @property
    def events_path(self) -> Path:
        """Where every rank appends its events."""
        return self.path / "events.jsonl"

    @property
    def report_path(self) -> Path:
        """The page for people."""
        return self.path / "report.html"

    def write_text(self, name: str, text: str) -> Path:
        """Write one file atomically: it has either the old text or the new one."""
        target = self.path / name
        part = self.path / f".{name}.part"
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(target)
        except OSError as exc:
            with contextlib.suppress(OSError):  # what made writing fail may make this fail too; the first says why
                part.unlink(missing_ok=True)
            raise LaconicError(f"cannot write {target}: {exc.strerror}.") from exc
        return target

    def write_results(self, results: Results) -> None:
        """Write results.json."""
        self.write_text("results.json", results.to_json())

    def results(self) -> Results:
        """Read results.json."""
        return Results.from_json(self.read_text("results.json"), str(self.path / "results.json"))

    def environment(self) -> Mapping[str, object]:
        """Read env.json; empty if the run has none."""
        path = self.path / "env.json"
        if not path.exists():
            return {}
        try:
            found = json.loads(self.read_text("env.json"))
        except (ValueError, RecursionError) as exc:
            raise UsageError(f"{path} is not JSON: {one_line(exc, 100)}.") from exc
        if not isinstance(found, dict):
            raise UsageError(f"{path} does not describe a machine.")
        typed_json.plain(found, str(path))
        return found

    def events(self) -> Iterator[Event]:
        """Read events.jsonl; none if the run has no such file. A last line cut short by a kill is left out."""
        if not self.events_path.exists():
            return
        with self.events_path.open(encoding="utf-8") as lines:
            yield from read_events(line for line in lines if line.endswith("\n"))

    @property
    def has_results(self) -> bool:
        """Whether there is a results.json."""
        return (self.path / "results.json").exists()

    def logs(self) -> list[Path]:
        """Every event log in the folder: processes of an elastic run may write one each."""
        return sorted(self.path.glob("*.jsonl"))

    def events_of_all_logs(self) -> Iterator[Event]:
        """Read every log; a last line cut short by a kill is left out."""
        for path in self.logs():
            try:
                with path.open(encoding="utf-8") as lines:
                    yield from read_events(line for line in lines if line.endswith("\n"))
            except (OSError, UnicodeDecodeError, LaconicError) as exc:
                raise UsageError(f"cannot read {path}: {one_line(exc).removesuffix('.')}.") from exc

    def read_text(self, name: str) -> str:
        """The text of one file."""
        try:
            return (self.path / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8 text"
            raise UsageError(f"{self.path} is not the folder of a run: cannot read {name}: {reason}.") from exc


def _fresh(parent: Path, name: str) -> Path:
    """A name that is not taken: two runs may begin within one second."""
    candidate, number = parent / name, 2
    while candidate.exists():
        candidate, number = parent / f"{name}-{number}", number + 1
    return candidate
