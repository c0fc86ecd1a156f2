"""`laconic compare`: real training on two processes, and what it refuses before it starts any."""

from __future__ import annotations

import json

import pytest

from laconic.cli import main

SMALL = ["--size", "tiny", "--steps", "6", "--batch", "2", "--hosts", "2"]


@pytest.mark.dist
@pytest.mark.timeout(120)
def test_ddp_and_strategies_side_by_side(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    out = tmp_path / "results.json"
    strategies = ["--strategy", "ddp", "--strategy", "bsp / all_reduce / bf16 + error_feedback / wfbp"]
    assert main(["compare", *SMALL, *strategies, "--bandwidth", "unlimited", "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert "torch DDP" in captured.out
    assert "6/6" in captured.err
    document = json.loads(out.read_text())
    assert document["config"]["steps"] == 6
    ddp, lossless, lossy = document["rows"]
    assert [row["strategy"] for row in document["rows"]] == [
        "torch DDP",
        "bsp / all_reduce / none / fusion",
        "bsp / all_reduce / bf16 + error_feedback / wfbp",
    ]
    assert lossless["final_loss"] == ddp["final_loss"], "the same weights, batches and arithmetic"
    assert lossy["final_loss"] == pytest.approx(ddp["final_loss"], rel=0.01)
    assert lossy["final_loss"] != ddp["final_loss"]
    for row in (lossless, lossy):
        assert row["counted_bytes_per_step"] == row["predicted_bytes_per_step"] > 0
        assert row["links"] == "unlimited"
    assert lossless["counted_bytes_per_step"] == 2 * lossy["counted_bytes_per_step"]
    assert ddp["speedup_over_ddp"] == 1.0


@pytest.mark.lab
@pytest.mark.timeout(120)
def test_behind_slow_links_the_kernel_confirms_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--size", "tiny", "--steps", "12", "--batch", "1", "--hosts", "3", "--bandwidth", "20mbit", "--json"]
    assert main(["compare", *words, "--strategy", "ddp", "--strategy", "ddp-bf16"]) == 0
    ddp, lossless, lossy = json.loads(capsys.readouterr().out)["rows"]
    for row in (lossless, lossy):
        assert row["links"] == "shaped"
        assert row["link"] == "20mbit"
        assert row["counted_bytes_per_step"] == row["predicted_bytes_per_step"]
        # Headers of TCP, IP and Ethernet, acknowledgements and Gloo's own, on a step of a few hundred kilobytes.
        assert 1.0 <= row["wire_bytes_per_step"] / row["counted_bytes_per_step"] < 1.15
    assert ddp["wire_bytes_per_step"] == pytest.approx(lossless["wire_bytes_per_step"], rel=0.05)
    assert lossy["speedup_over_ddp"] > 1.1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--steps", "0"], "steps must be >= 1"),
        (["--hosts", "0"], "hosts must be >= 1"),
        (["--hosts", "two"], "hosts"),
        (["--bandwidth", "fast"], "--bandwidth must be a rate"),
        (["--bandwidth", "unlimited", "--bandwidth", "1gbit"], "stands alone"),
        (["--size", "smal"], 'Did you mean "small"?'),
        (["--strategy", "bps"], 'Did you mean "bsp"?'),
        (["--data", "no-such-file.txt"], "cannot read the data file no-such-file.txt"),
    ],
)
def test_bad_input_is_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert told in captured.err


def test_data_that_is_no_text(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    binary, short = tmp_path / "binary", tmp_path / "short"
    binary.write_bytes(bytes(range(256)) * 100)
    short.write_text("too short")
    for path, told in ((binary, "is not UTF-8 text (byte 128)"), (short, "holds 9 bytes")):
        assert main(["compare", "--data", str(path)]) == 2
        assert told in capsys.readouterr().err


@pytest.mark.dist
@pytest.mark.timeout(60)
def test_results_that_cannot_be_written_are_known_before_training(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    assert main(["compare", *SMALL, "--out", str(tmp_path / "missing" / "results.json")]) == 2
    captured = capsys.readouterr()
    assert "cannot write the results" in captured.err
    assert "loss" not in captured.err
