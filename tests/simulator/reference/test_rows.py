"""Rows of published tables: what is read, what is refused, what is printed."""

from __future__ import annotations

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
