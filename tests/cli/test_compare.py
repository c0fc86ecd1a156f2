"""`laconic compare` and `laconic replay`: real runs on a few processes, what they keep, and what they refuse."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import socket
from pathlib import Path

import pytest
from tests.processes import Command, eventually, is_running, run_processes

from laconic.cli import main
from laconic.core.event import read_events
from laconic.experiments.config_file import load
from laconic.lab import launch

SMALL = ["--size", "tiny", "--steps", "6", "--batch", "2", "--hosts", "2"]
# For what goes wrong on one rank: another would only be waited for.
ALONE = ["--size", "tiny", "--batch", "1", "--hosts", "1", "--bandwidth", "unlimited", "--strategy", "ddp"]


def rows_of(folder: Path) -> list[dict[str, object]]:
    return json.loads((folder / "results.json").read_text())["rows"]


def curves_of(folder: Path) -> list[dict[str, list[float]]]:
    return json.loads((folder / "results.json").read_text())["curves"]


@pytest.fixture(scope="module")
def unlimited(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The folder of a run without slow links, and what it printed."""
    out, output, errors = tmp_path_factory.mktemp("compare") / "run", io.StringIO(), io.StringIO()
    strategies = ["--strategy", "ddp", "--strategy", "bsp / all_reduce / bf16 + error_feedback / wfbp"]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        assert main(["compare", *SMALL, *strategies, "--bandwidth", "unlimited", "--out", str(out)]) == 0
    return out, output.getvalue(), errors.getvalue()


@pytest.mark.dist
@pytest.mark.timeout(120)
def test_ddp_and_strategies_side_by_side(unlimited: tuple[Path, str, str]) -> None:
    out, output, errors = unlimited
    assert "torch DDP" in output
    assert "6/6" in errors
    assert str(out / "report.html") in output
    ddp, lossless, lossy = rows_of(out)
    assert [row["strategy"] for row in rows_of(out)] == [
        "torch DDP",
        "bsp / all_reduce / none / fusion",
        "bsp / all_reduce / bf16 + error_feedback / wfbp",
    ]
    assert lossless["final_loss"] == ddp["final_loss"], "the same weights, batches and arithmetic"
    assert lossy["final_loss"] == pytest.approx(ddp["final_loss"], rel=0.01)
    assert lossy["final_loss"] != ddp["final_loss"]
    for row in (lossless, lossy):
        assert row["counted_bytes_per_step"] == row["predicted_bytes_per_step"]
        assert row["links"] == "unlimited"
    assert lossless["counted_bytes_per_step"] == 2 * int(str(lossy["counted_bytes_per_step"]))
    assert ddp["predicted_bytes_per_step"] == lossless["predicted_bytes_per_step"]
    assert ddp["speedup_over_ddp"] == 1.0
    assert {"config.toml", "env.json", "events.jsonl", "results.json", "trace.json", "report.html"} == {
        path.name for path in out.iterdir()
    }
    with (out / "events.jsonl").open() as lines:
        events = list(read_events(lines))
    assert {event.rank for event in events} == {0, 1}
    assert {"forward", "backward", "optimizer", "iteration", "alone", "turn", "exchange", "encode", "wait"} <= {
        event.kind for event in events
    }
    assert json.loads((out / "trace.json").read_text())["traceEvents"]


@pytest.mark.lab
@pytest.mark.timeout(120)
def test_behind_slow_links_the_kernel_confirms_the_bytes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--size", "tiny", "--steps", "10", "--batch", "1", "--hosts", "3", "--bandwidth", "20mbit", "--json"]
    strategies = ["--strategy", "ddp", "--strategy", "ddp-bf16", "--torch-hook", "fp16"]
    assert main(["compare", *words, *strategies, "--out", str(tmp_path / "run")]) == 0
    ddp, hook, lossless, lossy = json.loads(capsys.readouterr().out)["rows"]
    for row in (lossless, lossy):
        assert row["links"] == "shaped"
        assert row["link"] == "20mbit"
        assert row["wire_bytes_source"] == "kernel"
        assert row["counted_bytes_per_step"] == row["predicted_bytes_per_step"]
        # Headers of TCP, IP and Ethernet, acknowledgements and Gloo's own, on a step of a few hundred kilobytes.
        assert 1.0 <= row["wire_bytes_per_step"] / row["counted_bytes_per_step"] < 1.15
    assert ddp["wire_bytes_per_step"] == pytest.approx(lossless["wire_bytes_per_step"], rel=0.05)
    assert lossy["speedup_over_ddp"] > 1.1
    assert hook["strategy"] == "torch DDP + fp16 hook"
    assert hook["wire_bytes_per_step"] == pytest.approx(lossy["wire_bytes_per_step"], rel=0.05)
    assert hook["predicted_bytes_per_step"] is None


@pytest.mark.dist
@pytest.mark.timeout(120)
def test_a_kept_configuration_over_paced_links_and_with_seconds_instead_of_steps(
    unlimited: tuple[Path, str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before, out, config = unlimited[0], tmp_path / "run", tmp_path / "config.toml"
    text = (before / "config.toml").read_text()
    for old, new in (
        ("steps = 6\n", "seconds = 1.5\ntarget_loss = 5.4\n"),
        ('links = "auto"', 'links = "paced"'),
        ('name = "unlimited"\n', 'name = "20mbit"\n[network.cluster]\nbandwidth = "20mbit"\nhosts = 2\n'),
    ):
        assert old in text
        text = text.replace(old, new)
    config.write_text(text)
    assert main(["compare", "--config", str(config), "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert "paced" in captured.out
    assert "paced" in captured.err
    assert load(str(out / "config.toml"), "compare") == load(str(config), "compare")
    rows = rows_of(out)
    assert {row["links"] for row in rows} == {"paced"}
    # A step sends this many bytes through 20 Mbit/s, whatever the machine; torch DDP is paced on equal terms.
    for row in rows:
        assert float(str(row["step_ms"])) >= int(str(row["predicted_bytes_per_step"])) * 8 / 20e6 * 1e3 * 0.95
        assert int(str(row["steps"])) % 5 == 0
        assert row["seconds_to_target"] is not None
    assert float(str(rows[2]["speedup_over_ddp"])) > 1.1
    # The same weights, batches and arithmetic as without links: the same losses to the last bit.
    for curve, free in zip(curves_of(out), curves_of(before), strict=True):
        assert curve["seconds"][-1] >= 1.5
        common = min(len(curve["loss"]), len(free["loss"]))
        assert common >= 5
        assert curve["loss"][:common] == free["loss"][:common]


@pytest.mark.lab
@pytest.mark.timeout(120)
def test_replay_takes_compute_or_communication_whichever_is_longer(tmp_path: Path) -> None:
    out = tmp_path / "run"
    workload = tmp_path / "job.json"
    layer = {"forward_s": 0.02, "backward_s": 0.04}
    layers = [
        {"name": f"layer{index}", **layer, "tensors": [{"name": f"layer{index}.weight", "shape": [250, 250]}]}
        for index in range(4)
    ]
    document = {"name": "job", "batch": 1, "source": "made up", "layers": layers}
    workload.write_text(json.dumps(document))
    words = ["--workload", str(workload), "--hosts", "2", "--bandwidth", "100mbit", "--steps", "6"]
    strategies = ["--strategy", "bsp-a2a", "--strategy", "wfbp-a2a"]
    assert main(["replay", *words, *strategies, "--out", str(out)]) == 0
    ddp, sequential, overlapped = rows_of(out)
    for row in (ddp, sequential, overlapped):
        assert float(str(row["step_ms"])) >= 240, "forward and backward are slept"
        assert row["final_loss"] is None
    assert sequential["predicted_bytes_per_step"] == 4 * 250 * 250 * 4
    # 1 MB at 100 Mbit/s is 80 ms after 240 ms of compute; overlapped, all but the last layer's hides behind it.
    assert float(str(sequential["exposed_ms"])) > 60
    assert float(str(overlapped["step_ms"])) < float(str(sequential["step_ms"])) - 20
    assert json.loads((out / "results.json").read_text())["kind"] == "replay"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--steps", "0"], "steps must be >= 1"),
        (["--steps", "5", "--seconds", "5"], "steps or seconds"),
        (["--seconds", "-1"], "seconds must be > 0"),
        (["--hosts", "0"], "number of hosts"),
        (["--hosts", "two"], "hosts"),
        (["--bandwidth", "fast"], "--bandwidth must be a rate"),
        (["--bandwidth", "0mbit"], "bandwidth must be between"),
        (["--bandwidth", "unlimited", "--bandwidth", "1gbit"], "stands alone"),
        (["--bandwidth", "1gbit", "--bandwidth", "1000mbit"], "given once"),
        (["--size", "smal"], 'Did you mean "small"?'),
        (["--strategy", "bps"], 'Did you mean "bsp"?'),
        (["--strategies", "none.txt"], "cannot read the strategies in none.txt"),
        (["--data", "no-such-file.txt"], "cannot read the data file"),
        (["--images", "no-such-file.npz"], "cannot read the image file"),
        (["--images", "a.npz", "--data", "b.txt"], "not both"),
        (["--cluster", "none.toml"], "cannot read the cluster file none.toml"),
        (["--cluster", "none.toml", "--hosts", "3"], "no effect beside --cluster"),
        (["--config", "none.toml"], "cannot read the configuration none.toml"),
        (["--config", "none.toml", "--seed", "3"], "--seed has no effect beside --config"),
        (["--links", "papered"], "links"),
        (["--device", "cuda"], "no GPU here"),
        (["--torch-hook", "fp16", "--links", "paced"], "hooks cannot be paced"),
        (["--learning-rate", "0"], "learning rate must be > 0"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert told in captured.err
    assert not list(tmp_path.iterdir())


def test_data_that_is_no_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    binary, short = tmp_path / "binary", tmp_path / "short"
    binary.write_bytes(bytes(range(256)) * 100)
    short.write_text("too short")
    for path, told in ((binary, "is not UTF-8 text (byte 128)"), (short, "holds 9 bytes")):
        assert main(["compare", "--data", str(path)]) == 2
        assert told in capsys.readouterr().err


def test_strategies_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    listed = tmp_path / "strategies.txt"
    listed.write_text("# nothing but comments\n\n")
    assert main(["compare", "--strategies", str(listed)]) == 2
    assert "lists no strategy" in capsys.readouterr().err
    listed.write_text("ddp  # fine\nbps\n")
    assert main(["compare", "--strategies", str(listed)]) == 2
    assert 'Did you mean "bsp"?' in capsys.readouterr().err


def test_a_folder_that_is_taken_is_known_before_training(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out, told in ((tmp_path, "not an empty folder"), (tmp_path / "file" / "run", "cannot make the folder")):
        assert main(["compare", *SMALL, "--bandwidth", "unlimited", "--out", str(out)]) == 2
        captured = capsys.readouterr()
        assert told in captured.err
        assert "loss" not in captured.err


def ranks_of(folder: Path) -> list[int]:
    """The processes that append to this run's events."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                command = (process / "cmdline").read_bytes()
                opened = [str(link.readlink()) for link in (process / "fd").iterdir()]
            except OSError:
                continue  # ended meanwhile
            if b"laconic.experiments.contest" in command and str(folder / "events.jsonl") in opened:
                found.append(int(process.name))
    return found


@pytest.mark.lab
@pytest.mark.timeout(120)
def test_a_host_killed_in_the_middle_names_it_and_keeps_what_was_measured(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["--size", "tiny", "--steps", "400", "--hosts", "2", "--bandwidth", "50mbit", "--strategy", "ddp"]
    with Command(["compare", *words, "--out", str(out)], tmp_path / "output") as process:
        assert eventually(lambda: re.search(r"step +10/400", process.stderr) is not None, 60), process.stderr
        victims = ranks_of(out)
        assert len(victims) == 2
        os.kill(victims[-1], signal.SIGKILL)
        assert process.wait(60) == 2, process.stderr
    errors = process.stderr
    assert "SIGKILL" in errors or "lost" in errors or "rank" in errors
    assert "what was measured until then is in" in errors
    document = json.loads((out / "results.json").read_text())
    assert document["problem"]
    assert len(document["rows"]) == 2
    assert all(5 <= row["steps"] < 400 for row in document["rows"])
    assert (out / "report.html").exists()
    assert not any(map(is_running, victims)), "the other rank is stopped"


@pytest.mark.dist
@pytest.mark.timeout(120)
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["--size", "tiny", "--steps", "4000", "--hosts", "2", "--bandwidth", "unlimited", "--strategy", "ddp"]
    with Command(["compare", *words, "--out", str(out)], tmp_path / "output") as process:
        assert eventually(lambda: re.search(r"step +10/4000", process.stderr) is not None, 60), process.stderr
        ranks = ranks_of(out)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert json.loads((out / "results.json").read_text())["problem"] == "interrupted from the keyboard"
    assert len(ranks) == 2
    assert eventually(lambda: not any(map(is_running, ranks)), 10)


@pytest.mark.dist
@pytest.mark.timeout(120)
def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    # A limit on the size of files is met at the same calls as the end of a disk.
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); "
    words = ["compare", *ALONE, "--steps", "100", "--out", str(tmp_path / "run")]
    code = f"{limit}import sys; from laconic.cli import main; sys.exit(main(arguments['words']))"
    (done,) = run_processes(code, world_size=1, arguments={"words": words}, may_fail=True, timeout_s=100)
    assert done.exit_code == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "File too large" in done.stderr
    assert "events.jsonl" in done.stderr


@pytest.mark.dist
@pytest.mark.timeout(120)
def test_a_port_that_is_taken_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(launch, "free_port", lambda: port)
        assert main(["compare", *ALONE, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert f"cannot start the process group at 127.0.0.1:{port}" in error
    assert "EADDRINUSE" in error or "already in use" in error
