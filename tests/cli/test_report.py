"""`laconic report`: where the page goes, what --json prints, what is refused."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.report.run_folders import SIX, make_run

from laconic.cli import main
from laconic.report.run_folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "runs" / "first", steps=4, num_ranks=1)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["report", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_the_page_of_one_run_lies_in_its_folder(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run.path)]) == 0
    assert capsys.readouterr().out == f"{run.report_path}\n"
    assert run.report_path.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_page_of_several_runs_lies_here(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "second", steps=4, num_ranks=1)
    assert main(["report", "runs/first", "runs/second"]) == 0
    assert capsys.readouterr().out == "report.html\n"
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "first" in page
    assert "second" in page
    assert not run.report_path.exists()


def test_out_names_the_file(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run.path), "--output", str(tmp_path / "x.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'x.html'}\n"
    assert (tmp_path / "x.html").exists()
    assert not run.report_path.exists()


def test_json_prints_the_rows_and_writes_nothing(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    results = run.results()
    run.write_results(replace(results, rows=(replace(results.rows[0], final_loss=float("nan")), *results.rows[1:])))
    assert main(["report", str(run.path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    (entry,) = document["runs"]
    assert entry["run"] == str(run.path)
    assert [row["name"] for row in entry["rows"]] == [name for _, name, _ in SIX]
    assert entry["rows"][0]["final_loss"] is None
    assert not run.report_path.exists()


def test_what_is_no_run_is_refused(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    assert "does not exist" in refused(capsys, str(tmp_path / "nowhere"))
    assert "is not a folder" in refused(capsys, str(file))
    assert "is not the folder of a run: cannot read results.json" in refused(capsys, str(tmp_path))
    assert "cannot read" in refused(capsys, "x" * 5000)
    assert "is given twice" in refused(capsys, str(run.path), f"{run.path}/../first")
    assert "give the folder of a run" in refused(capsys)
    assert "no effect together with --json" in refused(capsys, str(run.path), "--json", "--output", "x")
    run.write_text("results.json", "{}")
    assert "does not hold the results of a run" in refused(capsys, str(run.path))


def test_a_run_without_rows_is_refused_with_its_reason(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    run.write_results(replace(run.results(), rows=(), problem="no rank started."))
    assert "holds no measurements. It ended early: no rank started." in refused(capsys, str(run.path))


def test_a_file_that_cannot_be_written_is_one_line(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No such file or directory" in refused(capsys, str(run.path), "--output", str(run.path / "no" / "x.html"))
    run.report_path.mkdir()
    assert "cannot write" in refused(capsys, str(run.path))


def test_without_jinja2_it_says_what_to_install(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    for name in ("page", "standalone_html"):
        monkeypatch.delitem(sys.modules, f"laconic.report.{name}", raising=False)
    assert 'report needs jinja2. Install it with "pip install jinja2".' in refused(capsys, str(run.path))
