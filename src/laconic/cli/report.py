"""`laconic report RUN [RUN ...]`: one offline HTML page from the folders of one or more runs.

With --json, the rows instead, one entry per run in the order given:

    {"runs": [{"run": str, "kind": str, "title": str, "began": str, "problem": str or null, "rows": [{...}],
               "refused": [{...}]}]}

A row holds the fields of laconic.report.results.Row, an entry of "refused" those of Refused there. A number that
is not finite (a loss that diverged) is null. A single elastic run has a page and a document of its own:

    {"runs": [{"run": str, "kind": "elastic", ...}]}        with the fields of laconic.report.elastic_run.ElasticRun
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from laconic.cli.options.report import Arguments
from laconic.cli.terminal import emit, emit_json, printable
from laconic.errors import LaconicError, UsageError, one_line
from laconic.report.elastic_run import KINDS, ElasticRun, elastic_run
from laconic.report.results import Results
from laconic.report.run_folder import RunFolder
from laconic.report.strict_json import strict


def run(arguments: Arguments) -> int:
    """Write the page and say where it is, or print the rows."""
    folders = _folders(arguments.runs)
    if arguments.json and arguments.output is not None:
        raise UsageError("report: --output has no effect together with --json, which prints to standard output.")
    elastic = _elastic(folders)
    results = [] if elastic is not None else [_results(folder) for folder in folders]
    if arguments.json:
        entries = zip(folders, results, strict=True) if elastic is None else ()
        documents = [_as_json(folder, found) for folder, found in entries]
        if elastic is not None:
            document = strict(dataclasses.asdict(elastic))
            assert isinstance(document, dict), "a dataclass becomes a dictionary"
            documents = [{"run": str(folders[0].path), "kind": "elastic", **document}]
        emit_json({"runs": documents})
        return 0
    try:
        from laconic.report.elastic_page import render as render_elastic
        from laconic.report.page import render
    except ModuleNotFoundError as exc:
        # The library itself runs with torch and numpy alone, so an installation without jinja2 is legal.
        raise UsageError(f'report needs {exc.name}. Install it with "pip install jinja2".') from exc
    name = folders[0].path.resolve().name
    page = render(folders) if elastic is None else render_elastic(elastic, title=name)
    if arguments.output is None and len(folders) == 1:
        written = folders[0].write_text(folders[0].report_path.name, page)
    else:
        written = Path(arguments.output or "report.html")
        _write(written, page)
    emit(f"{printable(str(written))}\n")
    return 0


def _folders(paths: Sequence[str]) -> list[RunFolder]:
    if not paths:
        raise UsageError("report: give the folder of a run, as in: laconic report runs/20261115-093000-compare")
    folders: dict[Path, RunFolder] = {}
    for path in map(Path, paths):
        try:
            is_folder = path.is_dir()
        except (OSError, ValueError) as exc:
            raise UsageError(f"report: cannot read {one_line(path, 120)}: {one_line(exc)}.") from exc
        if not is_folder:
            what = "is not a folder" if path.exists() else "does not exist"
            raise UsageError(
                f"report: {one_line(path, 120)} {what}. Give folders of runs, which compare writes to runs/."
            )
        if path.resolve() in folders:
            raise UsageError(f"report: {one_line(path, 120)} is given twice.")
        folders[path.resolve()] = RunFolder(path)
    return list(folders.values())


def _elastic(folders: Sequence[RunFolder]) -> ElasticRun | None:
    """The elastic run in the only folder; None where the folders hold results, or should."""
    for folder in folders:
        events = [] if folder.has_results else [event for event in folder.events_of_all_logs() if event.kind in KINDS]
        if not any(event.kind == "view" for event in events):
            continue
        if len(folders) > 1:
            raise UsageError(
                f"report: {one_line(folder.path, 120)} is an elastic run, which gets a page of its own. Give it "
                "without others."
            )
        return elastic_run(events, str(folder.path))
    return None


def _results(folder: RunFolder) -> Results:
    results = folder.results()
    if not results.rows:
        why = f" It ended early: {one_line(results.problem, 300)}" if results.problem is not None else ""
        raise UsageError(f"report: {folder.path} holds no measurements.{why}")
    return results


def _as_json(folder: RunFolder, results: Results) -> dict[str, object]:
    return {
        "run": str(folder.path),
        "kind": results.kind,
        "title": results.title,
        "began": results.began,
        "problem": results.problem,
        "rows": [strict(dataclasses.asdict(row)) for row in results.rows],
        "refused": [dataclasses.asdict(refused) for refused in results.refused],
    }


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as exc:
        raise LaconicError(f"cannot write {path}: {exc.strerror}.") from exc
