"""`laconic simulate --serve`: the table, the document, and lines that cannot be read."""

from __future__ import annotations

import json

import pytest

from laconic.cli import main


def test_the_document_has_a_row_for_every_combination(capsys: pytest.CaptureFixture[str]) -> None:
    line = "model=llama3-70b device=h100_sxm tp=1,2,4,8 link=h100_sxm,l40s concurrency=8 precision=bf16"
    assert main(["simulate", "--serve", line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {(row["link"], row["tp"]): row for row in found["rows"]}
    assert len(rows) == 8
    assert "do not fit into 80 GB" in rows["h100_sxm", 1]["refused"], "141 GB on one GPU"
    for link in ("h100_sxm", "l40s"):
        shares = [rows[link, tp]["network_share"] for tp in (2, 4, 8)]
        assert shares == sorted(shares)
    assert rows["h100_sxm", 8]["token_s"] < rows["h100_sxm", 4]["token_s"] < rows["l40s", 4]["token_s"]
    assert any("hardly worth it" in line for line in found["worth_it"] if line.startswith("l40s"))
    assert any("extrapolated" in line for line in found["warnings"])


def test_the_table_and_disaggregated_workers(capsys: pytest.CaptureFixture[str]) -> None:
    line = "model=deepseek-v3 device=h200_sxm tp=8 ep=8 framework=sglang prefill_workers=2 decode_workers=1"
    assert main(["simulate", "--serve", line]) == 0
    out = capsys.readouterr().out
    assert "deepseek-v3 with fp8 on h200_sxm, sglang" in out
    assert " 24 " in out, "two workers of 8 GPUs for prompts, one for output"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tp", "write key=value"),
        ("concurency=8", 'no key "concurency". Did you mean "concurrency"'),
        ("tp=8 tp=4", "tp is given twice"),
        ("tp=eight", "tp must be whole numbers"),
        ("input=1,2", "input takes one value"),
        ("device=h100", 'no serving device "h100"'),
        ("model=llama-70", 'no model "llama-70"'),
        ("precision=fp16", 'precision cannot be "fp16"'),
        ("link=nvlink", 'link cannot be "nvlink"'),
        ("prefill_tp=2", "prefill_tp has no effect without prefill_workers"),
        ("prefill_workers=2 transfer=0", "bandwidth must be between 1kbit and 10tbit per second"),
        ("prefill_workers=2 transfer=-5gbit", "bandwidth must be between 1kbit and 10tbit per second"),
        ("tp=3", "tp=3 does not divide 64 heads; the nearest is tp=2"),
        ("tp=1 precision=bf16", "Use more GPUs or fewer bits"),
        ("tp=1 dp=4", "dp is for models with experts"),
        (f"concurrency={','.join(map(str, range(1, 600)))}", "points are more than 1000"),
    ],
)
def test_lines_that_cannot_be_read_are_refused(line: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--serve", line]) == 2
    assert expected in capsys.readouterr().err


def test_other_options_have_no_effect_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "ddp", "--serve", "tp=8"]) == 2
    assert "a strategy has no effect together with --serve" in capsys.readouterr().err
