"""`laconic simulate --parallel`: a plan, a search, strategies and sites; what cannot be used is refused."""

from __future__ import annotations

import json

import pytest

from laconic.cli import main

PLACE = ("--workload", "llama3-8b", "--cluster", "dgx-h100", "--batch", "64", "--sequence", "4096")


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["simulate", *words, *PLACE, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys, "--parallel", "dp=4 tp=4 zero=1 recompute=full sequence_parallel")
    assert (found["gpus"], found["parameters"], found["fitting"]) == (16, 8_030_261_248, 1)
    (row,) = found["rows"]
    assert row["plan"] == "dp=4 tp=4 zero=1 micro_batch=1 recompute=full sequence_parallel"
    assert row["strategy"] is None
    assert row["step_s"] == pytest.approx(sum(row["time_s"].values()))
    assert row["tokens_per_s"] == pytest.approx(64 * 4096 / row["step_s"])
    assert 0.1 < row["mfu"] < 0.8
    total = row["memory_gib"].pop("total")
    assert total == pytest.approx(sum(row["memory_gib"].values()))
    assert main(["simulate", "--parallel", "dp=16", *PLACE]) == 0
    assert "does not fit" in capsys.readouterr().out


def test_strategies_and_sites(capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys, "ddp", "ddp-bf16", "--parallel", "dp=8 tp=2 pp=2")
    assert [row["strategy"] for row in found["rows"]] == [
        "bsp / all_reduce / bf16 / fusion",
        "bsp / all_reduce / none / fusion",
    ]
    far = _json(capsys, "diloco(period=100)", "--parallel", "tp=8", "--sites", "4", "--uplink", "1gbit")
    assert (far["gpus"], far["batch"], far["sites"]) == (32, 256, 4)
    assert far["rows"][0]["time_s"]["exchange"] > 0


def test_a_search_gives_the_fastest_first(capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys, "--parallel", "search", "--workers", "8")
    times = [row["step_s"] for row in found["rows"]]
    assert len(times) == 6
    assert max(times[1:]) >= times[0] * 0.999
    assert all(row["fits"] for row in found["rows"])
    assert 0 < found["fitting"] < found["tried"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--parallel", "dp=2 tp=3"), "tp=2"),
        (("--parallel", "dp=2 tp=4", "--workers", "16"), "With dp=4 it does"),
        (("--parallel", "search"), "needs the number of GPUs: --workers N"),
        (("--parallel", "search", "--workers", "4,8"), "with --parallel, --workers must be one whole number"),
        (("--parallel", "dp=8", "--noise", "5%"), "--noise has no effect together with --parallel"),
        (("--parallel", "dp=8", "--sites", "2"), "--sites and --uplink go together"),
        (("--parallel", "dp=8", "--sites", "0", "--uplink", "1gbit"), "--sites must be at least 1, got 0"),
        (("--parallel", "dp=8", "--workers", "-8"), '--workers must be one whole number of at least 1, got "-8"'),
        (("--parallel", "serch", "--workers", "8"), 'cannot be "serch". Did you mean "search"?'),
        (("--parallel", "dp=99999999999"), "dp must be at most 1048576, got 99999999999"),
        (("--parallel", "dp=8", "--hosts", "-3"), "the number of hosts must be between 1 and 65536, got -3"),
        (("--parallel", "dp=8", "--sites", "2", "--uplink", "1gbit"), "needs a strategy"),
        (("ddp", "--parallel", "dp=8 zero=1"), "Give zero=0"),
        (("--parallel", "dp=3"), "not divisible by dp x micro_batch = 3"),
        (("--parallel", "dp=8", "--bandwidth", "1gbit,2gbit"), "one rate"),
    ],
)
def test_what_cannot_be_used_is_refused(
    words: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *words, *PLACE]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1


def test_a_model_and_a_plan_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--parallel", "dp=8"]) == 2
    assert "--parallel needs a large model" in capsys.readouterr().err
    assert main(["simulate", "--sites", "2"]) == 2
    assert "--sites has no effect without --parallel" in capsys.readouterr().err
    assert main(["simulate", "--parallel", "search", "--workers", "1", "--workload", "llama3-405b"]) == 2
    assert "does not fit into the memory of 1 GPUs under any of" in capsys.readouterr().err
    assert main(["simulate", "--parallel", "dp=8", "--workload", "llama3-8b", "--cluster", "two-sites"]) == 2
    assert "for several sites, --sites and --uplink" in capsys.readouterr().err
