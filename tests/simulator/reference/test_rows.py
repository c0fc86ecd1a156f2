"""Rows of published tables: what is read, what is refused, what is printed."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from laconic.cli import main
from laconic.errors import ConfigurationError
from laconic.simulator.reference import tables
from laconic.simulator.reference.published import PublishedTable, Row
from laconic.simulator.reference.rows import compare, read_rows, summary


class Doubled(PublishedTable):
    name = "doubled"
    source = "nobody, nowhere"
    columns = ("gpus", "kind")
    measured = ("seconds", "gib")
    carried_along = ("note",)
    calibrated_on = "nothing"

    def predict(self, row: Row) -> Mapping[str, float]:
        row.choice("kind", ("dense", "sparse"))
        return {"seconds": 2.0 * row.whole("gpus"), "gib": 1.0}

    def carried_rows(self) -> list[dict[str, str]]:
        return [{"gpus": "4", "kind": "dense", "seconds": "8"}]


def written(folder: Path, text: str) -> Path:
    path = folder / "rows.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_rows_are_read_predicted_and_compared(tmp_path: Path) -> None:
    text = '# source: here\n# units\ngpus,kind,seconds,note\n4,dense,10,"a, b"\n\n8.0,sparse,,\n# end\n16,dense,32,x\n'
    found = compare(Doubled(), read_rows(written(tmp_path, text), Doubled()))
    assert [row.predicted["seconds"] for row in found] == [8.0, 16.0, 32.0]
    assert [row.errors for row in found] == [{"seconds": pytest.approx(-0.2)}, {}, {"seconds": 0.0}]
    assert found[0].row["note"] == "a, b"
    errors = summary(found, "seconds")
    assert errors is not None
    assert (errors.count, errors.mean, errors.median, errors.largest) == (
        2,
        *[pytest.approx(x) for x in (0.1, 0.1, 0.2)],
    )
    assert summary(found, "gib") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "no header line"),
        ("# only words\n", "no header line"),
        ("gpus\n4\n", "the columns kind are missing"),
        ("gpus,kind,gqus\n4,dense,1\n", 'no column "gqus". Did you mean "gpus"'),
        ("gpus,gpus,kind\n4,4,dense\n", "the column gpus occurs twice"),
        ("gpus,kind\n4\n", "line 2: 1 cells, but the header has 2 columns"),
        (
            "gpus,kind\n4,dense\n#\nmany,dense\n",
            'line 4, column gpus: expected a whole number of at least 1, got "many"',
        ),
        ("gpus,kind\n0,dense\n", "column gpus: expected a whole number"),
        ("gpus,kind\n1.5,dense\n", "column gpus: expected a whole number"),
        ("gpus,kind\ninf,dense\n", "column gpus: expected a whole number"),
        ("gpus,kind\n4,dence\n", 'column kind: "dence" is not known. Did you mean "dense"'),
        ("gpus,kind,seconds\n4,dense,-1\n", "column seconds: expected a positive number"),
    ],
)
def test_bad_rows_are_refused_by_line_and_column(text: str, expected: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigurationError) as caught:
        compare(Doubled(), read_rows(path, Doubled()))
    assert expected in str(caught.value)


def test_the_command_prints_rows_errors_and_what_was_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(tables._CLASSES, "doubled", "doubled:Doubled")
    monkeypatch.setattr(tables, "import_module", lambda name: __import__("types").SimpleNamespace(Doubled=Doubled))
    path = written(tmp_path, "gpus,kind,seconds,gib\n4,dense,10,2\n8,sparse,16,\n")
    assert main(["simulate", "--reference", "doubled", "--rows", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            **{"gpus": 4, "kind": "dense", "seconds": 10, "gib": 2},
            **{"predicted": 8.0, "error": pytest.approx(-0.2), "predicted_gib": 1.0, "error_gib": -0.5},
        },
        {
            **{"gpus": 8, "kind": "sparse", "seconds": 16, "gib": ""},
            **{"predicted": 16.0, "error": 0.0, "predicted_gib": 1.0},
        },
    ]
    assert main(["simulate", "--reference", "doubled", "--rows", str(path)]) == 0
    out = capsys.readouterr().out
    assert "seconds: mean error 10.0%, median 10.0%, largest 20.0% (2 rows)" in out
    assert "gib: mean error 50.0%" in out
    assert "Calibrated on: nothing" in out
    assert main(["simulate", "--reference", "doubled", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["error"] == 0.0, "without a file: the rows that are carried"
    assert main(["simulate", "--reference", "doubled", "--rows", str(tmp_path / "none.csv")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_every_registered_table_keeps_the_contract() -> None:
    for name in tables.table_names():
        table = tables.published_table(name)
        assert table.source
        assert table.calibrated_on
        columns = [*table.columns, *table.measured, *table.carried_along]
        assert len(set(columns)) == len(columns)
        for cells in table.carried_rows():
            assert set(table.columns) <= set(cells) <= set(columns)
            assert table.measured[0] in cells, "a row is carried for what was measured"
        for found in compare(table, [Row(cells) for cells in table.carried_rows()]):
            assert all(value > 0 for value in found.predicted.values())


def doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tables._CLASSES, "doubled", "doubled:Doubled")
    monkeypatch.setattr(tables, "import_module", lambda name: __import__("types").SimpleNamespace(Doubled=Doubled))


def test_a_row_that_cannot_be_predicted_leaves_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    doubled(monkeypatch)
    path = written(tmp_path, "gpus,kind,seconds\n4,dence,\n8,sparse,16\n4\n2,dense,OOM\n")
    assert main(["simulate", "--reference", "doubled", "--rows", str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    first, second, third, fourth = json.loads(out)
    assert second == {"gpus": 8, "kind": "sparse", "seconds": 16, "predicted": 16.0, "error": 0.0, "predicted_gib": 1.0}
    assert 'line 2, column kind: "dence" is not known. Did you mean "dense"' in first["problem"]
    assert third == {"gpus": 4, "problem": "rows.csv, line 4: 1 cells, but the header has 3 columns."}
    assert 'line 5, column seconds: expected a positive number, got "OOM"' in fourth["problem"]
    assert "predicted" not in first
    assert "laconic: 3 of 4 rows cannot be predicted:\nrows.csv, line 2, column kind" in err
    assert main(["simulate", "--reference", "doubled", "--rows", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "sparse" in out
    assert "3 of 4 rows" in err


def test_a_file_without_any_row_that_can_be_predicted_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    doubled(monkeypatch)
    path = written(tmp_path, "gpus,kind\n4,dence\n0,sparse\n")
    assert main(["simulate", "--reference", "doubled", "--rows", str(path), "--json"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "line 2, column kind" in err
    assert "No other of the 2 rows can be predicted either." in err


def test_files_as_other_programs_write_them(tmp_path: Path) -> None:
    text = '\ufeffkind,gpus,note,seconds\r\n\r\nDENSE,"1,024","two\r\nlines",nan\r\n,,,\r\n"sparse",8.0,x,-\r\n'
    text += "sparse,1e3,,1E1\r\n"
    path = tmp_path / "rows.csv"
    path.write_bytes(text.encode("utf-8"))
    found = compare(Doubled(), read_rows(path, Doubled()))
    assert [row.predicted["seconds"] for row in found] == [2048.0, 16.0, 2000.0]
    assert [row.errors for row in found] == [{}, {}, {"seconds": 199.0}]
    assert [row.row.where for row in found] == ["rows.csv, line 4", "rows.csv, line 6", "rows.csv, line 7"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (",gpus,kind\n0,4,dense\n", "a column has no name. Name it, or remove it; pandas leaves out its index"),
        (f'gpus,kind\n4,"{"x" * 140_000}\n', "not a CSV file: field larger than field limit .* quotation mark"),
        ("gpus,kind\n1e16,dense\n", "line 2, column gpus: expected a whole number of at most 1000000000000000"),
    ],
)
def test_files_that_cannot_be_read_say_why(text: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        compare(Doubled(), read_rows(written(tmp_path, text), Doubled()))


@pytest.mark.parametrize(("text", "value"), [("True", True), ("1", True), ("yes", True), ("0.0", False), ("no", False)])
def test_flags(text: str, value: bool) -> None:
    assert Row({"kind": text}).flag("kind") is value
    with pytest.raises(ConfigurationError, match='row, column kind: expected True or False, got "2"'):
        Row({"kind": "2"}).flag("kind")


def test_numbers_that_json_does_not_have_stay_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    doubled(monkeypatch)
    path = written(tmp_path, "gpus,kind,note\n4,dense,nan\n4,dense,1e999\n")
    assert main(["simulate", "--reference", "doubled", "--rows", str(path), "--json"]) == 0
    out = capsys.readouterr().out
    assert [row["note"] for row in json.loads(out, parse_constant=pytest.fail)] == ["nan", "1e999"]


MISTAKES = [
    ("torchtitan", {"compile": "2"}, "column compile: expected True or False"),
    ("mpt-fsdp", {"precision": "amp_fp8"}, "column precision: .*a100_80gb does not multiply 8-bit floats"),
    ("zero3", {"model_parallel": "96"}, "column model_parallel: expected 1, as ZeRO-3 runs without"),
    ("deepep", {"topk": "1000"}, "1000 experts per token cannot be drawn from 256 experts"),
    ("deepep", {"experts": "100"}, ": 100 experts cannot be spread evenly"),
    ("diloco-utilization", {"method": "DiLoCo H=50"}, "column H: expected 50, as the method is DiLoCo H=50"),
    ("diloco-utilization", {"layers": "100000"}, "column layers: expected a whole number of at most 1000"),
    ("vtrain", {"hidden": "1000000000000"}, "hidden_size must be at most 10000000"),
    ("vtrain", {"dp": "99999999"}, "dp must be at most 1048576"),
]


@pytest.mark.parametrize(("name", "cells", "expected"), MISTAKES)
def test_no_cell_is_ignored_silently(name: str, cells: dict[str, str], expected: str) -> None:
    table = tables.published_table(name)
    with pytest.raises(ConfigurationError, match=f"^row.*{expected}"):
        compare(table, [Row({**table.carried_rows()[0], **cells})])


ASSUMED = [
    ("torchtitan", {"schedule": "GPipe", "pp": "2", "fsdp": "4", "local_batch": "4"}, "predicted as 1F1B"),
    ("torchtitan", {"schedule": "ZBVZeroBubble", "pp": "2", "fsdp": "4", "local_batch": "4"}, "one group of layers"),
    ("torchtitan", {"local_batch": "5", "pp": "2", "fsdp": "4"}, "micro-batches of one sequence"),
    ("torchtitan", {"fsdp": "4"}, "as sharding over 8 ranks instead of 2 replicas"),
    ("mpt-fsdp", {"act_offload": "True"}, "as if activations stayed on the GPU"),
    ("qwen3-moe", {"recompute": "norm,mpl"}, "as if mpl took no time"),
    ("qwen3-moe", {"fsdp": "on"}, "with sharded parameters"),
    ("nccl", {"library": "mpi"}, "like nccl"),
]


@pytest.mark.parametrize(("name", "cells", "says"), ASSUMED)
def test_what_is_not_modelled_is_predicted_with_a_warning(
    name: str, cells: dict[str, str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tables.published_table(name)
    carried = table.carried_rows()[0]
    row = {**{key: carried[key] for key in table.columns}, **cells}
    path = tmp_path / "rows.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([row.keys(), row.values()])
    assert main(["simulate", "--reference", name, "--rows", str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    column = next(iter(cells))
    expected = f'rows.csv, line 2, column {column}: "{cells[column]}" is not modelled; predicted'
    assert err.startswith(f"laconic: {expected}")
    assert says in err
    (record,) = json.loads(out)
    assert record["predicted"] > 0
    assert record["warning"].startswith(expected)


SPELLINGS = [
    ("torchtitan", {"precision": "float8 rowwise"}, {"precision": "float8_rowwise"}),
    ("torchtitan", {"compile": "False", "tp": ""}, {"compile": "0", "tp": "1"}),
    ("zero3", {"scheme": "zero-3", "params_b": "175"}, {}),
    ("korthikanti", {"recompute": "selective"}, {"recompute": "attn_only"}),
    ("diloco-utilization", {"method": "Streaming DiLoCo INT4 H=50", "H": ""}, {"method": "Streaming FP4", "H": "50"}),
    ("diloco-utilization", {"method": "data parallel"}, {"method": "Data-Parallel"}),
    ("qwen3-moe", {"fsdp": "no", "recompute": "act norm"}, {}),
    ("mpt-fsdp", {"act_ckpt": "false", "model": "7B"}, {}),
    ("nccl", {"op": "AllReduce"}, {}),
]


@pytest.mark.parametrize(("name", "cells", "same"), SPELLINGS)
def test_other_spellings_of_the_same_configuration(name: str, cells: dict[str, str], same: dict[str, str]) -> None:
    table = tables.published_table(name)
    row = table.carried_rows()[0]
    few = {key: row[key] for key in table.columns if key in row}
    found, expected = (dict(table.predict(Row({**few, **change}))) for change in (cells, same))
    if name == "zero3":
        # Days are those of the parameters in the row.
        del found["days_300b_tokens"], expected["days_300b_tokens"]
    assert found == expected
