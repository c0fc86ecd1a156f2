"""Calibration: what the errors of measured rows say about others, and what is refused."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

from laconic.cli import main
from laconic.errors import ConfigurationError, UsageError
from laconic.simulator.reference.published import Row
from laconic.simulator.reference.residuals import Calibrated, Smoothing, calibrated
from laconic.simulator.reference.rows import Compared, compare
from laconic.simulator.reference.tables import published_table

TABLE = published_table("serving")
TTFT, TPOT = TABLE.measured
CELLS = {
    **dict.fromkeys((*TABLE.columns, *TABLE.carried_along), ""),
    **{"backend": "vllm", "model_path": "meta-llama/Llama-3.1-70B", "system": "h100_sxm", "precision": "fp8"},
    **{"mode": "agg", "isl": "1024", "osl": "512", "concurrency": "8", "tp_size": "4"},
}


def row(measured: dict[str, float] | None = None, predicted_ms: float = 100.0, **cells: str) -> Compared:
    """A row that is predicted as `predicted_ms` in both columns."""
    given = {column: str(value) for column, value in (measured or {}).items()}
    predicted = dict.fromkeys(TABLE.measured, predicted_ms)
    errors = {column: predicted_ms / value - 1 for column, value in (measured or {}).items()}
    return Compared(Row({**CELLS, **given, **cells}, "rows.csv, line 2"), predicted, errors)


def one(asked: Compared, *measured: Compared, smoothing: Smoothing | None = None) -> Calibrated:
    return calibrated(TABLE, [asked], measured, smoothing)[0]


def test_one_measured_row_corrects_by_its_kernel() -> None:
    """With one row the mean of the process is k(row, measured) residual / (1 + noise)."""
    smoothing = Smoothing(word=0.5, count=0.2, noise=0.1)
    asked = row(system="h200_sxm", concurrency="32")
    found = one(asked, row({TTFT: 150.0}), smoothing=smoothing)
    distance = 0.5 + 0.2 * math.log(4)
    expected = 100 * math.exp(math.exp(-distance) * math.log(1.5) / 1.1)
    assert found.compared.predicted[TTFT] == pytest.approx(expected)
    assert found.uncalibrated == {TTFT: 100.0, TPOT: 100.0}
    assert (found.similar, found.also_measured) == ({TTFT: 1, TPOT: 0}, False)


def test_each_column_is_corrected_by_itself() -> None:
    found = one(row(), row({TTFT: 150.0}), row({TPOT: 80.0}, concurrency="16")).compared.predicted
    assert found[TTFT] > 130
    assert found[TPOT] < 90
    assert one(row(), row({TTFT: 150.0})).compared.predicted[TPOT] == 100.0


def test_a_row_that_was_measured_is_close_to_its_measurement_and_marked() -> None:
    found = one(row({TTFT: 150.0}), row({TTFT: 150.0}), row({TTFT: 90.0}, model_path="Qwen/Qwen3-32B"))
    assert abs(found.compared.errors[TTFT]) < 0.05
    assert found.also_measured


def test_similar_rows_count_only_where_they_have_the_measurement() -> None:
    measured = row({TPOT: 80.0}), row({TPOT: 90.0}, concurrency="16"), row({TTFT: 150.0}, system="b200_sxm", isl="64")
    assert one(row(), *measured).similar == {TTFT: 0, TPOT: 2}


@pytest.mark.parametrize(
    ("asked", "measured"),
    [
        ({"concurrency": "8"}, {"concurrency": "8.0"}),
        ({"moe_ep_size": ""}, {"moe_ep_size": "1"}),
        ({"concurrency": "", "batch_size": "8"}, {"concurrency": "8"}),
        ({"precision": "bf16"}, {"precision": "fp16"}),
        ({"precision": "nvfp4"}, {"precision": "mxfp4"}),
    ],
)
def test_one_configuration_in_two_spellings_is_one(asked: dict[str, str], measured: dict[str, str]) -> None:
    found = one(row(**asked), row({TTFT: 150.0}, **measured))
    assert found.also_measured
    assert found.compared.predicted[TTFT] == pytest.approx(100 * 1.5 ** (1 / 1.05))


@pytest.mark.parametrize(("measured_ms", "factor"), [(1e25, math.e), (1e-300, 1 / math.e)])
def test_an_absurd_measurement_counts_as_the_largest_residual(measured_ms: float, factor: float) -> None:
    assert one(row(), row({TTFT: measured_ms})).compared.predicted[TTFT] == pytest.approx(100 * factor ** (1 / 1.05))


def test_nothing_similar_leaves_the_prediction() -> None:
    far = {"backend": "sglang", "model_path": "Qwen/Qwen3-32B", "system": "b200_sxm", "precision": "fp4"}
    found = one(row(isl="64", concurrency="1", **far), row({TTFT: 150.0}))
    assert found.compared.predicted[TTFT] == pytest.approx(100.0, rel=0.02)
    assert found.similar == {TTFT: 0, TPOT: 0}


def test_disaggregated_rows_say_nothing_about_aggregated_ones() -> None:
    found = one(row(), row({TTFT: 150.0}, mode="disagg"))
    assert found.compared.predicted[TTFT] == 100.0
    assert found.similar == {TTFT: 0, TPOT: 0}


def test_several_rows_of_one_configuration_count_less_than_rows_of_several() -> None:
    """The copies of a slow row do not outvote two fast rows around it."""
    asked = row(concurrency="16")
    slow, fast = row({TTFT: 150.0}, concurrency="8"), row({TTFT: 70.0}, concurrency="32")
    few, many = (one(asked, *[slow] * number, fast).compared.predicted[TTFT] for number in (1, 20))
    assert many == pytest.approx(few, rel=0.05)


def test_a_single_wrong_measurement_counts_as_a_factor_of_e() -> None:
    found, limit = (one(row(), row({TTFT: 100 * factor})).compared.predicted[TTFT] for factor in (1000.0, math.e))
    assert found == pytest.approx(limit)


def test_models_of_one_shape_are_one_model() -> None:
    names = ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3")
    first, second = (TABLE.likeness(Row({**CELLS, "model_path": name})) for name in names)
    assert first == second


def test_no_row_to_predict_gives_none() -> None:
    assert calibrated(TABLE, [], [row({TTFT: 150.0})]) == []


def test_rows_to_calibrate_on_need_a_measurement() -> None:
    with pytest.raises(ConfigurationError, match=r"line 2: a row to calibrate on needs.*leave the row out"):
        one(row(), row())
    with pytest.raises(ConfigurationError, match="no measured row"):
        one(row())


def test_a_table_without_likeness_is_refused() -> None:
    table = published_table("zero3")
    rows = compare(table, [Row(cells) for cells in table.carried_rows()])
    with pytest.raises(UsageError, match="zero3 cannot be calibrated"):
        calibrated(table, rows, rows)


def write(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_the_command_tells_its_basis(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = write(tmp_path / "new.csv", CELLS, {**CELLS, "backend": "trtllm", "model_path": "Qwen/Qwen3-32B"})
    measured = write(tmp_path / "measured.csv", {**CELLS, TTFT: "400"}, {**CELLS, "concurrency": "16", TTFT: "500"})
    words = ["simulate", "--reference", "serving", "--rows", str(asked)]
    assert main([*words, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main([*words, "--calibrate", str(measured), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["uncalibrated"] for one in found] == [one["predicted"] for one in plain]
    assert abs(math.log(found[0]["predicted"] / 400)) < abs(math.log(plain[0]["predicted"] / 400))
    assert [(one["similar_measured"], one["also_measured"]) for one in found] == [(2, True), (0, False)]
    assert [one[f"similar_measured_{TPOT}"] for one in found] == [0, 0]
    assert found[0][f"predicted_{TPOT}"] == plain[0][f"predicted_{TPOT}"]
    assert main([*words, "--calibrate", str(measured)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Calibrated with 2 measured rows. " in out
    assert f"{TTFT}: 1 of 2 predictions have a similar measured row." in out
    assert f"{TPOT} is not corrected" in out
    assert "1 predicted row had been measured with the same configuration." in out, "and there is no error to doubt"


@pytest.mark.parametrize("columns", ["60", "120"])
def test_no_number_of_the_table_is_cut_off(
    columns: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    rows = [
        {**CELLS, "isl": isl, "osl": "2048", TTFT: "123.456", TPOT: tpot}
        for isl, tpot in (("512", "7.891"), ("1024", "8.5"))
    ]
    path = write(tmp_path / "rows.csv", *rows)
    words = ["simulate", "--reference", "serving", "--rows", str(path), "--calibrate", str(path)]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(words) == 0
    out = capsys.readouterr().out
    table = [line.split() for line in out.splitlines()]
    for row_in_json in found:
        shown = [str(row_in_json["isl"]), str(row_in_json[TPOT]), f"{row_in_json['predicted']:.4g}"]
        assert any(set(shown) <= set(line) for line in table), shown
    assert "…" not in out
    same = " ".join(out.split())
    assert "backend vllm" in same
    assert "osl 2048" in same
    assert f"{TTFT} 123.456" in same
    assert "moe_tp_size" not in same, "an empty column"
    assert "errors there say little" in same


def test_a_file_without_rows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "rows.csv", CELLS)
    empty = tmp_path / "empty.csv"
    empty.write_text(",".join([*CELLS, TTFT]) + "\n", encoding="utf-8")
    assert main(["simulate", "--reference", "serving", "--rows", str(path), "--calibrate", str(empty)]) == 2
    assert "has no rows" in capsys.readouterr().err


def test_a_file_without_a_measured_column_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "rows.csv", CELLS)
    assert main(["simulate", "--reference", "serving", "--rows", str(path), "--calibrate", str(path)]) == 2
    problem = capsys.readouterr().err
    assert "has no measured column" in problem
    assert len(problem.strip().splitlines()) == 1
