"""`laconic verify`: the table, the document, the exit code, and every way to get it wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from laconic.cli import main, verify
from laconic.experiments.verification import CHECKS, Findings, Outcome, matrix
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


_SMALL = {
    "synchronization": ["bsp", "local_sgd"],
    "architecture": ["all_reduce"],
    "compression": ["none", "powersgd"],
    "wrapper": ["momentum_correction"],
    "scheduling": ["fusion"],
}


@pytest.mark.usefixtures("_quick")
def test_the_matrix_counts_pairs_and_names_rules(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "matrix", lambda: matrix(_SMALL))
    assert main(["verify", "--matrix"]) == 0
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()]
    assert ["synchronization", "x", "wrapper", "2", "1", "1", "0"] in rows
    assert ["synchronization", "x", "compression", "4", "4", "0", "0"] in rows
    assert "momentum_correction adds up gradients of" in out
    assert "4 of 4 strategies" in out
    assert "0 failed" in out
    assert "4/4" in err
    monkeypatch.setitem(CHECKS, "bytes", _fails)
    assert main(["verify", "--matrix", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    entries = {tuple(entry["methods"].values()): entry for entry in document["matrix"]}
    assert entries["bsp", "none"]["verdict"] == "failed"
    refused = entries["local_sgd", "momentum_correction"]
    assert refused["verdict"] == "refused"
    assert refused["rule"] == "A change of parameters must arrive with its size, and once."
    assert "momentum_correction adds up gradients" in refused["reason"]


@pytest.mark.usefixtures("_quick")
def test_ctrl_c_prints_what_was_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "matrix", lambda: matrix(_SMALL))
    made = verify.verify_on_threads
    begun: list[Strategy] = []

    def second_is_interrupted(strategy: Strategy, workers: int, **options: Any) -> Findings:
        begun.append(strategy)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return made(strategy, workers, **options)

    monkeypatch.setattr(verify, "verify_on_threads", second_is_interrupted)
    assert main(["verify", "--matrix", "--json"]) == 130
    document = json.loads(capsys.readouterr().out)
    assert document["stopped"] is True
    assert document["passed"] is False
    assert [found["strategy"] for found in document["findings"]] == [str(begun[0])]
    assert {entry["verdict"] for entry in document["matrix"]} == {"passed", "refused", "not reached"}


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
