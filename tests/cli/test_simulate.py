"""`laconic simulate`: the table, the JSON, sweeps, files it writes, and every way to get it wrong."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from laconic.cli import main
from laconic.cli.simulate import DEFAULT_STRATEGIES
from laconic.cluster import Cluster, Link, cluster
from laconic.simulator.reference import quantitative_survey
from laconic.simulator.simulation import Conditions, simulate
from laconic.strategy import SEVEN, Strategy
from laconic.workload import workload

HEAD = ["name", "strategy", "cluster", "workers", "bandwidth_bps", "refused"]
NUMBERS = ["step_s", "compute_s", "exposed_s", "samples_per_s", "efficiency", "wire_bytes"]
KEYS = [*HEAD, *NUMBERS, "busy", "critical_path", "spread_s"]


def simulate_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["simulate", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def text(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["simulate", *words]) == 0
    return capsys.readouterr().out


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["simulate", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("laconic: error: ")
    assert err.count("\n") == 1
    return err


def test_json_says_what_the_simulator_says(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulate_json(capsys, "ddp", "bsp / gossip", "--cluster", "ethernet-1g", "--workers", "4")
    assert list(found) == ["workload", "batch", "fidelity", "conditions", "rows", "warnings", "verdict"]
    assert [row["name"] for row in found["rows"]] == ["ddp", "d-psgd"]
    for row in found["rows"]:
        assert list(row) == KEYS
        expected = simulate(row["strategy"], workload("resnet50"), cluster("ethernet-1g", 4)).prediction.as_json()
        assert {key: row[key] for key in NUMBERS} == {key: expected[key] for key in NUMBERS}
        assert (row["workers"], row["bandwidth_bps"], row["refused"]) == (4, 1e9, None)
        assert sum(part["share"] for part in row["critical_path"]) == pytest.approx(1)


def test_options_reach_the_simulator(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulate_json(
        capsys,
        *("ddp", "--workload", "vgg16", "--compute", "300ms", "--hosts", "4", "--bandwidth", "5gbit", "--delay", "1ms"),
        *("--slow", "3=2", "--slow", "1=1.5", "--noise", "5%", "--interference", "20%", "--optimizer", "3ms"),
    )
    conditions = Conditions(slow={3: 2.0, 1: 1.5}, noise_ratio=0.05, interference_ratio=0.2, optimizer_s=0.003)
    job = workload("vgg16").scaled(compute_s=0.3)
    made = Cluster.uniform(4, Link(bandwidth_bps=5e9, delay_s=1e-3))
    expected = simulate("ddp", job, made, conditions=conditions).prediction.as_json()
    (row,) = found["rows"]
    assert {key: row[key] for key in [*NUMBERS, "spread_s"]} == {key: expected[key] for key in [*NUMBERS, "spread_s"]}
    assert found["conditions"] == {
        "slow": {"3": 2.0, "1": 1.5},
        "noise_ratio": 0.05,
        "interference_ratio": 0.2,
        "optimizer_s": 0.003,
    }


def test_without_a_strategy_there_is_one_of_each_kind_and_presets_keep_their_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert [row["name"] for row in simulate_json(capsys)["rows"]] == list(DEFAULT_STRATEGIES)
    assert [row["name"] for row in simulate_json(capsys, "--preset", "seven")["rows"]] == list(SEVEN)


def test_strategies_come_from_files_too_and_each_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(Strategy.parse("dear").to_toml(), encoding="utf-8")
    (tmp_path / "more.txt").write_text("# none\nddp\nbsp / all_reduce / none / fusion\n", encoding="utf-8")
    found = simulate_json(capsys, str(tmp_path / "mine.toml"), "--strategies", str(tmp_path / "more.txt"))
    assert [row["name"] for row in found["rows"]] == ["dear", "ddp"]


@pytest.mark.parametrize("columns", ["80", "120", "200"])
def test_the_table_fits_and_says_why(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    out = text(capsys, "ddp", "powersgd", "--cluster", "ethernet-1g")
    assert max(map(len, out.splitlines())) <= int(columns)
    flat = " ".join(out.split())
    assert "8 workers on ethernet-1g: 8 hosts at 1gbit, delay 25us" in flat
    assert re.search(r"^ddp +1\.\d\d s", out, re.MULTILINE)
    assert re.search(r"^powersgd +\d+\.\d ms", out, re.MULTILINE)
    assert "waits for" in flat
    assert flat.count("is not known and counted as zero") == 1
    assert "…" not in out


def test_noise_and_target_have_columns_with_ranges(capsys: pytest.CaptureFixture[str]) -> None:
    out = text(
        capsys, "ddp", "powersgd", "diloco / all_reduce / int8", "diloco(period=64)", "--noise", "5%", "--target"
    )
    line = {row.split()[0]: row for row in out.splitlines() if " ms " in row and not row.startswith("diloco /")}
    assert re.search(r"\d+\.\d \(\d+\.\d-\d+\.\d\) ms", line["ddp"])
    assert re.search(r"1\.0x +\d\.\d\d min", line["ddp"])
    assert re.search(r"1\.5x \(0\.9-\d\.\d\) +\d\.\d+ \(\d\.\d+-\d+\.\d+\) min", line["powersgd"])
    assert line["diloco(period=64)"].count("not measured") == 2
    assert re.search(r"1\.\dx \(\d\.\d-\d\.\d\) \*", out)
    assert "their combination was not" in " ".join(out.split())
    assert "takes losses for a model of this size instead, so it may name another strategy" in " ".join(out.split())


def test_target_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    rows = simulate_json(capsys, "ssp", "diloco(period=64)", "--target")["rows"]
    assert rows[1]["target"] is None
    target = rows[0]["target"]
    assert target["steps_ratio_low"] < target["steps_ratio"] < target["steps_ratio_high"]
    assert target["seconds"] == pytest.approx(1000 * rows[0]["step_s"] * target["steps_ratio"])
    assert target["because"] == "ssp / parameter_server / none: loss +9.3% after 384 steps (+-3.9% between seeds)"


def test_a_sweep_is_the_product_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("dear", "ddp", "--workers", "4..16", "--bandwidth", "1gbit,10gbit", "--bandwidth", "25gbit")
    rows = simulate_json(capsys, *words)["rows"]
    assert [(row["bandwidth_bps"], row["workers"], row["name"]) for row in rows] == [
        (rate, workers, name) for rate in (1e9, 10e9, 25e9) for workers in (4, 8, 16) for name in ("dear", "ddp")
    ]
    assert rows[0]["cluster"].startswith("4 hosts at 1gbit")
    out = text(capsys, *words)
    groups = re.findall(r"^ *(\d+gbit) +(\d+)  dear", out, re.MULTILINE)
    assert groups == [(rate, str(number)) for rate in ("1gbit", "10gbit", "25gbit") for number in (4, 8, 16)]
    assert len(re.findall(r" ddp +\d", out)) == 9


def test_a_strategy_that_is_refused_says_so_beside_others_and_alone_it_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    grid = "bsp / all_reduce(algorithm=torus2d)"
    out = text(capsys, "ddp", grid, "--workers", "7")
    assert re.search(r"torus2d.* refused", out)
    assert "7 is a prime" in " ".join(out.split())
    rows = simulate_json(capsys, "ddp", grid, "--workers", "7")["rows"]
    assert [row["refused"] is None for row in rows] == [True, False]
    assert list(rows[1]) == HEAD
    assert "7 is a prime" in complaint(capsys, grid, "--workers", "7")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("dpd",), 'Did you mean "ddp"?'),
        (("ddp", "--workload", "resnet51"), 'Did you mean "resnet50"?'),
        (("ddp", "--cluster", "ethernet-10"), 'Did you mean "ethernet-10g"?'),
        (("ddp", "--workers", "8..4"), "--workers must lie between 1 and"),
        (("ddp", "--workers", "16", "--hosts", "8"), "16 workers need as many devices"),
        (("ddp", "--bandwidth", "fast"), "--bandwidth must be a rate such as 100mbit"),
        (("ddp", "--compute", "soon"), "--compute must be a time such as 5ms"),
        (("ddp", "--slow", "3"), "--slow must be RANK=FACTOR"),
        (("ddp", "--slow", "x=2"), "--slow must be RANK=FACTOR"),
        (("ddp", "--slow", "9=2"), "there is no rank 9"),
        (("ddp", "--slow", "1=2", "--slow", "1=3"), "--slow is given twice for rank 1"),
        (("ddp", "--output", "."), 'cannot write ".": it is a folder'),
        (("ddp", "--trace", ""), "it is a folder. Give the name of a file"),
        (("ddp", "--trace", "both.json", "--output", "./both.json"), "--trace and --output both name ./both.json"),
        (("ddp", "--noise", "200%"), "noise_ratio must be at least 0 and below 1"),
        (("ddp", "--preset", "seven"), "not both"),
        (("ddp", "--inside", "64gbit"), "--inside has no effect with one device per host"),
        (("ddp", "--trace", "t.json", "--workers", "4,8"), "leave out the sweep"),
        (("ddp", "--output", "no/such/folder/page.html"), "there is no folder"),
        (
            ("--reference", "quantitative-survey", "--workers", "4"),
            "--workers has no effect together with --reference, whose",
        ),
        (
            ("--reference", "quantitative-survey", "--rows", "a.csv"),
            "--rows has no effect together with --reference quantit",
        ),
        (("--rows", "a.csv"), "--rows has no effect without --reference"),
        (("--calibrate", "a.csv"), "--calibrate has no effect without --reference"),
        (("--reference", "serving", "--calibrate", "a.csv"), "--calibrate needs --rows"),
        (
            ("--reference", "quantitative-survey", "--calibrate", "a.csv"),
            "--calibrate has no effect together with --reference quantit",
        ),
        (("--reference", "no-such"), 'there is no table "no-such"'),
        (("ddp", "--reference", "quantitative-survey"), "a strategy has no effect together with --reference"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(
    words: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in complaint(capsys, *words)


def test_assumptions_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulate_json(capsys, "ddp", "--devices", "8", "--workers", "16")
    assert "PCIe 4.0" in found["warnings"][0]
    assert simulate_json(capsys, "ddp", "--devices", "8", "--workers", "16", "--inside", "64gbit")["warnings"] == []


def test_both_fidelities_agree_on_a_ring_behind_one_switch(capsys: pytest.CaptureFixture[str]) -> None:
    plain, flow = (simulate_json(capsys, "ddp", "--fidelity", name)["rows"][0] for name in ("analytic", "flow"))
    assert flow["step_s"] == pytest.approx(plain["step_s"], rel=1e-6)


def test_the_trace_holds_one_turn_per_strategy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    out = text(capsys, "ddp", "dear", "--trace", str(path), "--slow", "1=2")
    assert "ui.perfetto.dev" in out
    records = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    turns = [record for record in records if record.get("cat") == "turn" and record["pid"] == 1]
    assert [turn["name"].partition(" on ")[0] for turn in turns] == [
        str(Strategy.parse(name)) for name in ("ddp", "dear")
    ]
    assert turns[0]["ts"] + turns[0]["dur"] < turns[1]["ts"]
    assert {record["args"]["name"] for record in records if record["name"] == "process_name"} == {
        "7 ranks",
        "1 rank, compute x 2",
    }


def test_the_page_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert str(path) in text(capsys, "ddp", "--workers", "2,4", "--output", str(path)).replace("\n", "")
    assert path.read_text(encoding="utf-8").lstrip().startswith("<!doctype html>")


def test_the_reference_is_printed_as_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"model": "ResNet-50", "network": "10GbE", "method": name, "gpus": 8, "throughput": 1234.5}
        for name in ("A", "B")
    ]
    # What it says is tested where it is made; making it takes seconds.
    monkeypatch.setattr(quantitative_survey, "table", lambda: rows)
    assert main(["simulate", "--reference", "quantitative-survey", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == rows
    out = text(capsys, "--reference", "quantitative-survey")
    assert [line.split() for line in out.splitlines()] == [
        ["model", "network", "method", "gpus", "throughput"],
        ["ResNet-50", "10GbE", "A", "8", "1,234.5"],
        ["ResNet-50", "10GbE", "B", "8", "1,234.5"],
    ]


def test_the_example_of_the_page_is_what_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    page = (Path(__file__).resolve().parents[2] / "docs" / "simulator.md").read_text(encoding="utf-8")
    command, shown = re.findall(r"```console\n\$ laconic simulate (.*?)\n(.*?)```", page, re.DOTALL)[0]
    assert text(capsys, *shlex.split(command)) == shown, "paste what it prints now into docs/simulator.md"


@pytest.mark.parametrize("columns", ["70", "100"])
def test_long_names_take_two_lines_and_are_never_cut(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    texts = [f"bsp / all_reduce / powersgd(rank={rank}) + error_feedback / fusion(bytes=1MiB)" for rank in (2, 3)]
    assert main(["simulate", *texts, "--bandwidth", "1gbit,10gbit", "--workers", "4"]) == 0
    out = capsys.readouterr().out.partition("\nstep: ")[0]
    assert out.count("powersgd(rank=2)") == out.count("powersgd(rank=3)") == 2
    assert out.count("fusion(bytes=1MiB)") == 4
