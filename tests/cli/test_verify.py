"""`laconic verify`: the table, the document, the exit code, and every way to get it wrong."""

from __future__ import annotations

import json

import pytest

from laconic.cli import main, verify
from laconic.experiments.verification import CHECKS, Cell, Outcome
from laconic.experiments.verification.stage import Stage
from laconic.strategy import Strategy


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only two checks are made."""
    for name in set(CHECKS) - {"staleness", "bytes"}:
        monkeypatch.delitem(CHECKS, name)


def _fails(stage: Stage, strategy: Strategy) -> Outcome:
    return Outcome("failed", f"rank {stage.rank} does not like it")


@pytest.mark.usefixtures("_quick")
def test_a_table_of_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "bsp / all_reduce / int8", "--workers", "2,3"]) == 0
    out, err = capsys.readouterr()
    assert "bsp / all_reduce / int8 / fusion, 2 workers (threads of one process)" in out
    assert "3 workers" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["bytes", "passed"] in [row[:2] for row in rows]
    assert ["staleness", "not", "applicable"] in [row[:3] for row in rows]
    assert "2/2" in err


@pytest.mark.usefixtures("_quick")
def test_a_document_and_exit_code_1_if_a_check_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CHECKS, "bytes", _fails)
    assert main(["verify", "ddp", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["passed"] is False
    (finding,) = document["findings"]
    assert finding["strategy"] == "bsp / all_reduce / none / fusion"
    assert (finding["workers"], finding["where"], finding["passed"]) == (2, "threads", False)
    assert finding["checks"][1] == {"check": "bytes", "verdict": "failed", "words": "rank 0 does not like it"}
    assert main(["verify", "ddp"]) == 1
    assert "1 checks failed." in capsys.readouterr().out


@pytest.mark.usefixtures("_quick")
def test_the_matrix_is_one_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = [
        Cell("bsp / all_reduce / none", Strategy(), None),
        Cell("bsp / gossip / int8", Strategy.parse("bsp / choco / int8"), "gossip would lose something"),
        Cell("bsp / gossip / powersgd", None, "choco cannot read it"),
    ]
    monkeypatch.setattr(verify, "cells", lambda: matrix)
    assert main(["verify", "--matrix", "--workers", "2"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert ["none", "-", "ok"] in rows
    assert ["choco", "/", "int8", "-", "ok"] in rows
    assert ["powersgd", "refused"] in rows
    assert "bsp / gossip / int8 - checked as choco / int8: gossip would lose something." in out
    assert "bsp / gossip / powersgd - refused: choco cannot read it." in out
    monkeypatch.setitem(CHECKS, "bytes", _fails)
    assert main(["verify", "--matrix", "--workers", "2,3"]) == 1
    assert "FAILED 2,3" in capsys.readouterr().out
    assert main(["verify", "--matrix", "--workers", "2", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [entry["strategy"] for entry in document["matrix"]] == [
        "bsp / all_reduce / none / fusion",
        "bsp / choco / int8 / fusion",
        None,
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "give a strategy or --matrix, one of the two"),
        (["ddp", "--matrix"], "give a strategy or --matrix, one of the two"),
        (["ddp", "--workers", "1"], "workers must be >= 2 and <= 16, got 1"),
        (["ddp", "--workers", "two"], "--workers must be a whole number"),
        (["bsp", "/", "gossip"], "Put a strategy that contains spaces in quotes"),
        (['bsp / parameter_server(hosts="there:1")'], "Leave hosts out"),
        (['bsp / all_reduce / int8 + per_layer(skip="nothing")'], "matches no parameter"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(240)
def test_the_same_checks_on_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "local_sgd(period=2)", "--workers", "2", "--processes", "--json"]) == 0
    threads, processes = json.loads(capsys.readouterr().out)["findings"]
    assert (threads["where"], processes["where"]) == ("threads", "processes")
    assert [check["check"] for check in processes["checks"]] == list(CHECKS)
    assert [check["verdict"] for check in processes["checks"]] == [check["verdict"] for check in threads["checks"]]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_shards_are_checked_on_processes_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "bsp / sharded(weights=int8) / int4 + error_feedback", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert found["where"] == "processes"
    verdicts = {check["check"]: check["verdict"] for check in found["checks"]}
    assert verdicts.pop("staleness") == "not applicable"
    assert set(verdicts.values()) == {"passed"}
