"""`laconic explain`: the words, the bytes, and every way to get it wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laconic.cli import main
from laconic.cli.explain import parse_count
from laconic.errors import UsageError
from laconic.strategy import AXES, PRESETS, Strategy

KEYS = [
    "strategy",
    "settings",
    "workers",
    "params",
    "shards",
    "state_bytes",
    "wire_bytes_per_step",
    "exact",
    "uncompressed_bytes_per_step",
    "between_hosts_bytes_per_step",
    "ratio",
    "loss",
    "cannot_combine",
    "words",
]


def explain_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["explain", *words, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("params", [1, 13, 25_000_000])
@pytest.mark.parametrize(("compression", "bytes_per_value"), [("none", 4), ("fp16", 2), ("bf16 + error_feedback", 2)])
def test_bytes_follow_the_ring_formula(
    workers: int, params: int, compression: str, bytes_per_value: int, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"bsp / all_reduce / {compression} / fusion"
    found = explain_json(capsys, text, "--workers", str(workers), "--params", str(params))
    # A ring all-reduce sends (n-1)/n of the data twice; a part of a byte is a byte, once per bucket.
    sent, plain = (2 * (workers - 1) * params * size / workers for size in (bytes_per_value, 4))
    assert 0 <= found["wire_bytes_per_step"] - sent < 100
    assert 0 <= found["uncompressed_bytes_per_step"] - plain < 100
    assert found["exact"] is True
    if workers == 1:
        assert found["ratio"] is None
    else:
        assert found["ratio"] == found["uncompressed_bytes_per_step"] / found["wire_bytes_per_step"]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_explained(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = explain_json(capsys, name)
    assert list(found) == KEYS
    assert found["strategy"] == str(Strategy.parse(name))
    assert (found["workers"], found["params"]) == (4, 25_000_000)
    assert Strategy.from_table(found["settings"]) == Strategy.parse(name)
    assert [line.partition(":")[0] for line in found["words"]] == list(AXES)


def test_settings_and_reasons_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    found = explain_json(capsys, "bsp / all_reduce / fp16 + error_feedback / fusion(bytes=1MiB)")
    assert found["settings"]["compression"]["with"] == [{"name": "error_feedback", "residual": "gradient"}]
    assert found["settings"]["scheduling"]["bytes"] == 1024 * 1024
    assert "bytes=1MiB: A bucket is exchanged when it holds this many bytes." in found["words"][3]
    assert "fp16" in found["words"][2]
    assert "error_feedback" in found["words"][2]
    assert any("applied twice" in reason for reason in found["cannot_combine"])


@pytest.mark.parametrize("columns", ["80", "120"])
def test_text_holds_the_whole_story_and_fits(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["explain", "ddp-fp16", "--workers", "8", "--params", "125M"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("bsp / all_reduce / fp16 / fusion\n")
    assert "(8 workers, 125,000,000 fp32 parameters)" in out
    assert f"{2 * 7 * 125_000_000 * 2 // 8:,} bytes" in out
    assert f"{2 * 7 * 125_000_000 * 4 // 8:,} bytes" in out
    assert "2 times fewer bytes" in out
    assert "at least, from bytes alone" in out
    # 437.5 MB over 100 Mbit/s = 35 s, and a thousandth of it over 100 Gbit/s.
    times = {line.split("  ")[1]: line.split() for line in out.splitlines() if "bit/s  " in line}
    assert times["100 Mbit/s"][2:] == ["35.0", "s", "70.0", "s"]
    assert times["100 Gbit/s"][2:] == ["35.0", "ms", "70.0", "ms"]
    assert "control" in out
    assert "buffers" in out
    assert "Cannot be combined with" in out
    assert max(map(len, out.splitlines())) <= int(columns)
    assert "\x1b" not in out


def test_parameters_are_taken_for_matrices(capsys: pytest.CaptureFixture[str]) -> None:
    # Of 80 matrices of 512 x 512 rank 4 keeps 4 * 1024 numbers each.
    found = explain_json(capsys, "bsp / all_reduce / powersgd", "--params", str(80 * 512 * 512))
    assert found["ratio"] == 512 * 512 / (4 * 1024)


@pytest.mark.parametrize("params", ["1", "13", "4097", "1e9", "1e15"])
@pytest.mark.parametrize("compression", ["none", "int8", "topk", "powersgd"])
def test_any_number_of_parameters(compression: str, params: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = explain_json(capsys, f"bsp / all_reduce / {compression}", "--params", params)
    assert found["uncompressed_bytes_per_step"] == 6 * float(params)
    assert 0 < found["wire_bytes_per_step"] <= 6 * max(float(params), 4)


def test_a_bound_is_called_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain_json(capsys, "bsp / all_reduce / threshold + error_feedback")["exact"] is False
    main(["explain", "bsp / all_reduce / threshold + error_feedback"])
    out = capsys.readouterr().out
    assert "this strategy, at most" in out
    assert "at worst, " in out


def test_shards_divide_bytes_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    strategy = "diloco(period=10) / all_reduce / bf16 + error_feedback"
    whole = explain_json(capsys, strategy, "--workers", "2", "--params", "64M")
    shard = explain_json(capsys, strategy, "--workers", "2", "--params", "64M", "--shards", "8")
    assert shard["shards"] == 8
    assert 8 * shard["wire_bytes_per_step"] == pytest.approx(whole["wire_bytes_per_step"], rel=1e-2)
    # An anchor, a momentum and a residual of every value.
    assert whole["state_bytes"] == 3 * 4 * 64_000_000
    assert 8 * shard["state_bytes"] == pytest.approx(whole["state_bytes"], rel=1e-2)
    assert main(["explain", strategy, "--shards", "8"]) == 0
    out = capsys.readouterr().out
    assert "parameters in 8 shards)" in out
    assert "bytes for residuals, momenta or older copies" in out


def test_workers_that_hold_shards_are_compared_with_fsdp2(capsys: pytest.CaptureFixture[str]) -> None:
    plain = explain_json(capsys, "bsp / sharded", "--workers", "4", "--params", "16M")
    assert plain["wire_bytes_per_step"] == plain["uncompressed_bytes_per_step"] == 3 * 3 * 16_000_000
    packed = explain_json(capsys, "bsp / sharded(weights=int8) / int4 + error_feedback", "--params", "16M")
    assert 4.5 < packed["ratio"] < 4.8
    assert packed["state_bytes"] == 4 * 16_000_000, "a residual of the whole gradient"
    assert main(["explain", "bsp / sharded"]) == 0
    assert "uncompressed FSDP2" in capsys.readouterr().out
    assert main(["explain", "bsp / sharded", "--shards", "8"]) == 2
    assert "Give --workers 8" in capsys.readouterr().err


def test_bytes_between_hosts_are_told_where_a_strategy_tells_hosts_apart(capsys: pytest.CaptureFixture[str]) -> None:
    strategy = "bsp / sharded(weights=int8, between=int4) / int8"
    found = explain_json(capsys, strategy, "--workers", "16", "--ranks-per-host", "8", "--params", "16M")
    # One sum of 1/16 of the gradient in half a byte to the other host, and a scale of 4 bytes for 256 values.
    assert found["between_hosts_bytes_per_step"] == pytest.approx(16e6 / 16 * (0.5 + 4 / 256), rel=0.01)
    # Before anybody says so, there are two hosts.
    assert explain_json(capsys, strategy, "--workers", "16", "--params", "16M") == found
    four = explain_json(capsys, strategy, "--workers", "16", "--ranks-per-host", "4", "--params", "16M")
    assert four["between_hosts_bytes_per_step"] == 3 * found["between_hosts_bytes_per_step"]
    assert explain_json(capsys, "bsp / sharded / int8")["between_hosts_bytes_per_step"] is None
    assert main(["explain", strategy, "--workers", "16", "--ranks-per-host", "8"]) == 0
    assert "of it, gradients to other hosts" in capsys.readouterr().out
    for text, ranks, problem in (
        ("bsp / sharded / int8", "2", "--ranks-per-host has no effect"),
        (strategy, "3", "hosts have 1 to 3 ranks"),
        (strategy, "4", "all ranks share one host"),
        (strategy, "none", "--ranks-per-host must be a whole number"),
    ):
        assert main(["explain", text, "--workers", "4", "--ranks-per-host", ranks]) == 2
        assert problem in capsys.readouterr().err


def test_one_worker_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "ddp", "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert "(1 worker, " in out
    assert "one worker sends nothing" in out


def test_a_toml_file_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[strategy.compression]\nname = "fp16"\nwith = ["error_feedback"]\n', encoding="utf-8")
    assert explain_json(capsys, str(path))["strategy"] == "bsp / all_reduce / fp16 + error_feedback / fusion"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8", 8),
        ("25_000_000", 25_000_000),
        ("25M", 25_000_000),
        ("1.1B", 1_100_000_000),
        ("2k", 2000),
        ("1e9", 10**9),
        (" 3 ", 3),
    ],
)
def test_counts(text: str, count: int) -> None:
    assert parse_count(text, "--params", at_most=10**15, example="8") == count


@pytest.mark.parametrize(
    "text",
    ["0", "-1", "", "1.5", "nan", "inf", "1e400", "1e999999999", "9" * 400, "1e-3", "0x10", "1M5", "25MiB", "٣", "8,0"],
)
def test_odd_numbers_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--params must be a whole number from 1 to 1,000, such as 8, got"):
        parse_count(text, "--params", at_most=1000, example="8")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["ddp", "--workers", "0"], '--workers must be a whole number from 1 to 1,000,000, such as 8, got "0"'),
        (["ddp", "--workers", "-4"], '--workers must be a whole number from 1 to 1,000,000, such as 8, got "-4"'),
        (["ddp", "--params", "-1"], "--params must be"),
        (["ddp", "--params=1e30"], "--params must be"),
        (["ddp", "--workers", "many"], "--workers must be"),
        (["dpp"], 'Did you mean "ddp"?'),
        ([""], "expected a method name"),
        (["bsp /"], "expected a method name"),
        (["bsp / all_reduce / fp61"], 'Did you mean "fp16"?'),
        (["bsp / all_reduce / none / fusion(byte=1)"], 'Did you mean "bytes"?'),
        (["bsp / all_reduce / none / fusion(bytes=0)"], "scheduling.fusion.bytes"),
        (["bsp / all_reduce / none + error_feedback"], "Nearest that works"),
        (["a / b / c / d / e"], "at most 4"),
        (["x" * 5000], "at most 2000 characters"),
        (["no/such/file.toml"], "cannot read strategy file"),
        (["/dev.toml/x.toml"], "cannot read strategy file"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("laconic: error: ")
    assert err.count("\n") == 1
    assert told in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\xff\xfe\x00\x01", "not UTF-8"),
        (b"\x00\x01\x02", "cannot be read"),
        (b"", "empty"),
        (b"strategy = 3", "must be a table"),
        (b"[strategy]\nsynchronisation = 'bsp'", 'Did you mean "synchronization"?'),
        (b"[strategy.scheduling]\nname = 'fusion'\nbytes = [1]", "scheduling.fusion.bytes"),
    ],
)
def test_bad_toml_files_are_one_line_and_exit_2(
    content: bytes, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    assert main(["explain", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert told in err


@pytest.mark.parametrize(
    ("strategy", "loss", "instead"),
    [
        ("wfbp-a2a", "the same, because it computes what torch DDP computes", False),
        ("topk-ef", "+15.8% after 300 steps (+-3.6% between seeds)", True),
        ("bsp / all_reduce / topk(density=0.3) + error_feedback", "not measured", False),
        (
            "bsp / all_reduce / int8",
            "-0.4% after 300 steps (+-0.7% between seeds), +0.0% after 600 steps with 124 M parameters",
            False,
        ),
    ],
)
def test_what_it_costs_in_loss_is_told_and_what_to_use_instead(
    strategy: str, loss: str, instead: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain_json(capsys, strategy)["loss"] == loss
    assert main(["explain", strategy]) == 0
    said = capsys.readouterr().out
    assert loss in said
    assert ("these end within 1% of torch DDP's loss: " in said) == instead
