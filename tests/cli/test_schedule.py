"""`laconic schedule`: what it prints, and what it refuses in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laconic.cli import main

TRACE = """job,arrival_s,gpus,steps,duration_s,gradient_bytes
a,0,1,6000,600,1e8
b,30,4,9000,900,1e8
c,60,2,1000,300,2e8
d,90,4,3000,300,1e8
"""


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "jobs.csv"
    path.write_text(TRACE)
    return str(path)


def test_a_table_and_a_document(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["schedule", "--trace", trace, "--hosts", "4", "--devices", "2", "--policy", "fifo", "--policy", "cassini"]
    page = tmp_path / "page.html"
    assert main([*words, "--output", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "4 jobs on 8 GPUs" in printed
    assert "fifo" in printed
    assert "Who has GPUs when" in page.read_text()
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in found["policies"]] == ["fifo", "cassini"]
    row = found["policies"][0]
    assert row["makespan_s"] == max(job["finish_s"] for job in row["jobs"])
    assert row["avg_jct_s"] == pytest.approx(sum(job["completion_s"] for job in row["jobs"]) / 4)
    assert {job["job"] for job in row["jobs"]} == set("abcd")


def test_services_take_gpus_first(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    services, page = tmp_path / "services.csv", tmp_path / "page.html"
    head = "service,arrival_s,duration_s,requests_per_s,request_s,latency_s"
    services.write_text(f"{head}\n<chat>,0,1200,1;3,0.5,2\n")
    words = ["schedule", "--trace", trace, "--hosts", "4", "--devices", "2", "--policy", "fifo"]
    assert main([*words, "--services", str(services), "--output", str(page)]) == 0
    assert "<chat>" in capsys.readouterr().out
    assert "&lt;chat&gt;" in page.read_text()
    assert main([*words, "--services", str(services), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["policies"]
    (served,) = row["services"]
    assert served["requests"] == pytest.approx(600 * 1 + 600 * 3)
    assert main([*words, "--json"]) == 0
    (alone,) = json.loads(capsys.readouterr().out)["policies"]
    assert alone["avg_jct_s"] < row["avg_jct_s"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "no jobs were given"),
        (["--policy", "fifi"], 'Did you mean "fifo"'),
        (["--hosts", "2"], "asks for 4 GPUs, but the cluster has 2"),
        (["--round", "10s", "--start", "10s"], "would make no progress"),
        (["--tables", "x"], "--tables has no effect without --reference"),
        (["--worker", "v100"], "--worker has no effect without --throughputs"),
        (["--reference", "shockwave"], "no effect together with --reference"),
        (["--output", "/nowhere/at/all.html"], "there is no folder"),
        (["--round", "soon"], "must be a time"),
    ],
)
def test_mistakes(words: list[str], told: str, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--trace", trace] if words else []
    assert main(["schedule", *given, *words]) == 2
    assert told in capsys.readouterr().err


def test_a_reference_says_what_it_needs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LACONIC_TABLES", raising=False)
    assert main(["schedule", "--reference", "shockwave"]) == 2
    assert "Give --tables FOLDER" in capsys.readouterr().err
    assert main(["schedule", "--reference", "shockwave", "--tables", str(tmp_path)]) == 2
    assert "shockwave_tacc32_policies.csv" in capsys.readouterr().err
