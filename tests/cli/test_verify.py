"""`laconic verify`: the table, the document, the exit code, and every way to get it wrong."""

from __future__ import annotations

import json
import multiprocessing
import signal
import subprocess
import sys
from typing import Any

import pytest
from tests.processes import ROOT, getting_ctrl_c

from laconic.cli import main, verify
from laconic.experiments.verification import CHECKS, Findings, Matrix, Outcome, matrix
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
    assert {"check": "bytes", "verdict": "failed", "words": "rank 0 does not like it"} in finding["checks"]
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


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(240)
def test_several_strategies_of_the_matrix_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {**_SMALL, "compression": ["none"], "wrapper": []}
    monkeypatch.setattr(verify, "matrix", lambda: matrix(small))
    assert main(["verify", "--matrix", "--jobs", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["findings"]
    assert {one["strategy"] for one in found} == {str(strategy) for strategy in matrix(small).rows}
    assert all({check["check"] for check in one["checks"]} == set(CHECKS) for one in found)
    assert not multiprocessing.active_children()


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


@pytest.mark.usefixtures("_quick")
def test_ctrl_c_while_the_results_are_printed_changes_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = verify.emit_sections

    def interrupted(*sections: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        printed(*sections)

    def stop(*given: Any, **options: Any) -> Findings:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "emit_sections", interrupted)
    monkeypatch.setattr(verify, "verify_on_threads", stop)
    with getting_ctrl_c():
        assert main(["verify", "ddp"]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert "Stopped by Ctrl-C before all checks were made." in capsys.readouterr().out


def test_ctrl_c_while_strategies_are_chosen_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> Matrix:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "matrix", stop)
    assert main(["verify", "--matrix"]) == 130
    assert "none was verified" in capsys.readouterr().out
    assert main(["verify", "--matrix", "--json"]) == 130
    document = json.loads(capsys.readouterr().out)
    assert document == {"passed": False, "stopped": True, "findings": [], "matrix": []}


_STUCK = """
import json, sys, threading
from laconic.cli import main, verify
from laconic.experiments.verification import CHECKS, Outcome, matrix

begun = set()

def check(stage, strategy):
    begun.add(str(strategy))
    if len(begun) > 1:
        stage.meet() if stage.rank else threading.Event().wait(100)
    return Outcome("passed", "at once")

names = json.loads(sys.argv[1])
CHECKS.clear()
CHECKS["bytes"] = check
verify.matrix = lambda: matrix(names)
sys.exit(main(["verify", "--matrix"]))
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_process_that_gets_sigint_prints_its_table() -> None:
    """Its main thread waits for ranks: one of them is stuck in the second strategy, the other waits for it."""
    out, code = _interrupted(_STUCK, _SMALL)
    assert code == 130
    rows = [line.split() for line in out.splitlines()]
    assert ["methods", "pairs", "passed", "refused", "failed", "not", "reached"] in rows
    assert "Stopped by Ctrl-C: 1 of 4 strategies, 1 checks (2 threads)" in out


_SHARDS = """
import json, sys
from laconic.cli import main, verify
from laconic.experiments.verification import matrix

names = json.loads(sys.argv[1])
verify.matrix = lambda: matrix(names)
sys.exit(main(["verify", "--matrix"]))
"""


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(300)
def test_strategies_that_processes_have_verified_are_in_the_table() -> None:
    names = {**_SMALL, "synchronization": ["bsp"], "architecture": ["sharded"], "compression": ["int8", "int4"]}
    out, code = _interrupted(_SHARDS, {**names, "wrapper": []})
    assert code == 130
    assert "Stopped by Ctrl-C: 1 of 2 strategies" in out
    assert "(2 processes)" in out


def _interrupted(script: str, names: dict[str, list[str]]) -> tuple[str, int]:
    """The output and the exit code of a process that gets SIGINT once it has verified its first strategy."""
    words, pipe = [sys.executable, "-c", script, json.dumps(names)], subprocess.PIPE
    with getting_ctrl_c():
        process = subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)
    with process:
        try:
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            assert any(line.startswith("  1/") for line in lines), "it verified nothing"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert "Traceback" not in err
    return out, process.returncode


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "give either a strategy or --matrix"),
        (["ddp", "--matrix"], "give either a strategy or --matrix"),
        (["ddp", "--workers", "1"], "workers must be >= 2 and <= 16, got 1"),
        (["ddp", "--workers", "two"], "--workers must be a whole number"),
        (["bsp", "/", "gossip"], "Put a strategy that contains spaces in quotes"),
        (['bsp / parameter_server(hosts="there:1")'], "Leave hosts out"),
        (["ddp", "--jobs", "2"], "--jobs has an effect only with --matrix"),
        (["--matrix", "--jobs", "0"], "--jobs must be"),
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
