"""results.json and the folder of a run: what is written can be read, what cannot be read says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laconic.core.event import Event, EventLog
from laconic.errors import LaconicError, UsageError
from laconic.report.results import Curve, Results
from laconic.report.run_folder import RunFolder
from tests.report.test_advice import DDP

RESULTS = Results(
    kind="compare",
    title="a test",
    began="2026-11-15T09:30:00+0000",
    seconds=1.5,
    problem=None,
    target_loss=1.0,
    rows=(DDP,),
    curves=(Curve(strategy="torch DDP", link="100mbit", step=[1], loss=[None], seconds=[0.1], wire_bytes=[9]),),
    refused=(),
    advice=("use it.",),
)


def test_round_trip(tmp_path: Path) -> None:
    folder = RunFolder.create("test", tmp_path / "run")
    folder.write_results(RESULTS)
    assert folder.results() == RESULTS
    row = json.loads((tmp_path / "run" / "results.json").read_text())["rows"][0]
    wanted = "strategy link step_ms exposed_ms wire_bytes_per_step predicted_bytes_per_step final_loss"
    assert set(f"{wanted} seconds_to_target speedup_over_ddp links".split()) <= set(row)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{}", '{"format": 1}', '{"format": 2}', RESULTS.to_json().replace('"step_ms"', '"step"')],
)
def test_what_is_no_results_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(UsageError, match=r"results\.json"):
        RunFolder(tmp_path).results()


def test_folders_never_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = RunFolder.create("compare"), RunFolder.create("compare")
    assert first.path != second.path, "two runs may begin within one second"
    first.write_text("config.toml", "")
    with pytest.raises(UsageError, match="not an empty folder"):
        RunFolder.create("compare", first.path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot make the folder"):
        RunFolder.create("compare", tmp_path / "file" / "run")


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    folder = RunFolder.create("test", tmp_path / "run")
    folder.write_text("env.json", "{}")
    (tmp_path / "run" / ".env.json.part").mkdir()
    with pytest.raises(LaconicError, match=r"cannot write .*env\.json"):
        folder.write_text("env.json", "new")
    assert folder.read_text("env.json") == "{}"


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    folder = RunFolder.create("test", tmp_path / "run")
    assert list(folder.events()) == []
    with EventLog(folder.events_path) as log:
        log.write(Event("turn", 1.0, 0, 0))
    with folder.events_path.open("a") as file:
        file.write('{"kind": "tur')
    assert [event.kind for event in folder.events()] == ["turn"]


def test_of_several_logs_the_one_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = RunFolder.create("test", tmp_path / "run")
    with EventLog(tmp_path / "run" / "events-0.jsonl") as log:
        log.write(Event("turn", 1.0, 0, 0))
    (tmp_path / "run" / "events-1.jsonl").write_text("nonsense\n")
    with pytest.raises(LaconicError, match=r"cannot read .*events-1\.jsonl: line 1 is not an event record"):
        list(folder.events_of_all_logs())
