"""`laconic compare` and `laconic replay`: real runs on a few processes, what they keep, and what they refuse.

A rank that is started as users start it loads torch first, for seconds. So few are: where the start is not what
matters, ranks are forked from a process that has it, and runs that end early are held at the same time.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
from tests.processes import Command, RankResult, eventually, is_running, run_processes

from laconic.cli import main
from laconic.core.event import read_events
from laconic.experiments import contest, run
from laconic.experiments.comparison import default_strategies
from laconic.experiments.config_file import load
from laconic.lab.launch import Place, RankFailed

SMALL = ["--size", "tiny", "--steps", "6", "--batch", "2", "--hosts", "2"]
# For what goes wrong on one rank: another would only be waited for.
ALONE = ["--size", "tiny", "--batch", "1", "--hosts", "1", "--bandwidth", "unlimited", "ddp"]


def rows_of(folder: Path) -> list[dict[str, object]]:
    return json.loads((folder / "results.json").read_text())["rows"]


def curves_of(folder: Path) -> list[dict[str, list[float]]]:
    return json.loads((folder / "results.json").read_text())["curves"]


def rank_of_a_contest(config: str, environments: list[dict[str, str]]) -> None:
    os.environ.update(environments[int(os.environ["RANK"])])
    sys.argv[1:] = [config]
    assert contest.main() == 0


def forked_ranks(
    command: Sequence[str],
    places: Sequence[Place],
    *,
    timeout_s: float,
    environment: Mapping[str, str],
    on_line: Callable[[int, str], None],
) -> None:
    """As run_ranks, but with ranks that have torch already; what they say is heard at the end."""
    environments = [{**environment, **place.environment} for place in places]
    results = run_processes(
        "tests.cli.test_compare:rank_of_a_contest",
        world_size=len(places),
        arguments={"config": command[-1], "environments": environments},
        timeout_s=100,
    )
    for result in results:
        for line in result.stdout.splitlines():
            on_line(result.rank, line)


@pytest.fixture(scope="module")
def unlimited(tmp_path_factory: pytest.TempPathFactory, ends: object) -> tuple[Path, str, str]:
    """The folder of a run without slow links, and what it printed; `ends` come to theirs meanwhile."""
    out, output, errors = tmp_path_factory.mktemp("compare") / "run", io.StringIO(), io.StringIO()
    strategies = ["ddp", "bsp / all_reduce / bf16 + error_feedback / wfbp"]
    with (
        patch.object(run, "run_ranks", forked_ranks),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        assert main(["compare", *SMALL, *strategies, "--bandwidth", "unlimited", "--output", str(out)]) == 0
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


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(120)
def test_sharded_models_beside_torchs_own_hsdp(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    strategies = ["bsp / all_reduce / none / fusion", "bsp / sharded / none / fusion", "diloco(period=2)"]
    words = ["--sharded", "--ranks-per-host", "2", "--bandwidth", "unlimited", "--output", str(out)]
    with patch.object(run, "run_ranks", forked_ranks):
        assert main(["compare", *SMALL, *strategies, *words]) == 0
    printed = capsys.readouterr().out
    assert "vs HSDP" in printed
    assert "2 hosts of 2 ranks that share one model" in printed
    rows = rows_of(out)
    assert [row["strategy"] for row in rows][:3] == ["torch HSDP", *strategies[:2]]
    native, between, inside, local = (curve["loss"] for curve in curves_of(out))
    assert between == native, "the same shards, batches and arithmetic"
    assert inside == pytest.approx(native, rel=1e-5)
    assert local[0] == native[0]
    assert local[-1] != native[-1]
    for row in rows[1:3]:
        assert row["counted_bytes_per_step"] == row["predicted_bytes_per_step"]
    # Half the model's gradients, from each rank to the host of the other; over all ranks more is sent.
    assert int(str(rows[1]["counted_bytes_per_step"])) < int(str(rows[2]["counted_bytes_per_step"]))
    assert all(float(str(row["compute_ms"])) > 0 for row in rows)
    page = (out / "report.html").read_text()
    assert "times as fast as ${D.ddp}" in page
    assert '"ddp": "torch HSDP"' in page.replace('"ddp":"', '"ddp": "')
    assert "torch DDP" not in page


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(120)
def test_a_kept_configuration_over_paced_links_and_with_seconds_instead_of_steps(
    unlimited: tuple[Path, str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before, out, config = unlimited[0], tmp_path / "run", tmp_path / "config.toml"
    text = (before / "config.toml").read_text()
    for old, new in (
        ("steps = 6\n", "seconds = 0.6\ntarget_loss = 5.4\n"),
        ('links = "auto"', 'links = "paced"'),
        ('name = "unlimited"\n', 'name = "30mbit"\n[network.cluster]\nbandwidth = "30mbit"\nhosts = 2\n'),
    ):
        assert old in text
        text = text.replace(old, new)
    config.write_text(text)
    with patch.object(run, "run_ranks", forked_ranks):
        assert main(["compare", "--config", str(config), "--output", str(out)]) == 0
    captured = capsys.readouterr()
    assert "paced" in captured.out
    assert "paced" in captured.err
    assert load(str(out / "config.toml"), "compare") == load(str(config), "compare")
    rows = rows_of(out)
    assert {row["links"] for row in rows} == {"paced"}
    # A step sends this many bytes through 30 Mbit/s, whatever the machine; torch DDP is paced on equal terms.
    for row in rows:
        assert float(str(row["step_ms"])) >= int(str(row["predicted_bytes_per_step"])) * 8 / 30e6 * 1e3 * 0.95
        assert int(str(row["steps"])) % 5 == 0
        assert row["seconds_to_target"] is not None
    assert float(str(rows[2]["speedup_over_ddp"])) > 1.1
    # The same weights, batches and arithmetic as without links: the same losses to the last bit.
    for curve, free in zip(curves_of(out), curves_of(before), strict=True):
        # The slowest rank's clock decides when the seconds are over; a curve shows rank 0's, which may be earlier.
        assert curve["seconds"][-1] >= 0.4
        common = min(len(curve["loss"]), len(free["loss"]))
        assert common >= 5
        assert curve["loss"][:common] == free["loss"][:common]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--steps", "0"], "steps must be >= 1"),
        (["--steps", "5", "--seconds", "5"], "steps or seconds"),
        (["--seconds", "-1"], "seconds must be > 0"),
        (["--target-loss", "nan"], "target_loss must be a finite number, got nan"),
        (["--hosts", "0"], "number of hosts"),
        (["--hosts", "two"], "hosts"),
        (["--bandwidth", "fast"], "--bandwidth must be a rate"),
        (["--bandwidth", "0mbit"], "bandwidth must be between"),
        (["--bandwidth", "unlimited", "--bandwidth", "1gbit"], "cannot be combined"),
        (["--bandwidth", "1gbit", "--bandwidth", "1000mbit"], "given once"),
        (["--size", "smal"], 'Did you mean "small"?'),
        (["bps"], 'Did you mean "bsp"?'),
        (["--strategies", "none.txt"], "cannot read the strategies in none.txt"),
        (["--data", "no-such-file.txt"], "cannot read the data file"),
        (["--images", "no-such-file.npz"], "cannot read the image file"),
        (["--images", "a.npz", "--data", "b.txt"], "not both"),
        (["--cluster", "none.toml"], "cannot read the cluster file none.toml"),
        (["--cluster", "none.toml", "--hosts", "3"], "no effect together with --cluster"),
        (["--config", "none.toml"], "cannot read the configuration none.toml"),
        (["--config", "none.toml", "--seed", "3"], "--seed has no effect together with --config"),
        (["--links", "papered"], "links"),
        (["--device", "cuda"], "no GPU here"),
        (["--torch-hook", "fp16", "--links", "paced"], "hooks cannot be paced"),
        (["--learning-rate", "0"], "learning rate must be > 0"),
        (["--ranks-per-host", "0"], "ranks_per_host must be >= 1"),
        (["--sharded"], "--ranks-per-host 2 or more"),
        (["--sharded", "--hosts", "1", "--ranks-per-host", "4"], "--hosts 2 or more"),
        (
            ["--sharded", "--ranks-per-host", "2", "--torch-hook", "fp16"],
            "--torch-hook has no effect together with --sharded",
        ),
        (["--sharded", "--ranks-per-host", "2", "--links", "paced"], "FSDP2 cannot be paced"),
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
        assert main(["compare", *SMALL, "--bandwidth", "unlimited", "--output", str(out)]) == 2
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


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.timeout(120)
def test_behind_slow_links_the_kernel_confirms_the_bytes_and_a_killed_host_is_named(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["--size", "tiny", "--steps", "400", "--batch", "1", "--hosts", "2", "--bandwidth", "50mbit"]
    strategies = ["ddp", "ddp-bf16", "--torch-hook", "fp16"]
    with Command(["compare", *words, *strategies, "--output", str(out)], tmp_path / "output") as process:
        # Contenders take turns of five steps: then all of them have had two.
        assert eventually(lambda: re.search(r"step +1[1-5]/400", process.stderr) is not None, 60), process.stderr
        victims = ranks_of(out)
        assert len(victims) == 2
        os.kill(victims[-1], signal.SIGKILL)
        assert process.wait(60) == 2, process.stderr
    assert "SIGKILL" in process.stderr or "lost" in process.stderr or "rank" in process.stderr
    assert "the measurements until then are in" in process.stderr
    assert not any(map(is_running, victims)), "the other rank is stopped"
    assert (out / "report.html").exists()
    document = json.loads((out / "results.json").read_text())
    assert document["problem"]
    assert all(10 <= row["steps"] < 400 for row in document["rows"])
    ddp, hook, lossless, lossy = document["rows"]
    for row in (lossless, lossy):
        assert row["links"] == "shaped"
        assert row["link"] == "50mbit"
        assert row["wire_bytes_source"] == "kernel"
        assert row["counted_bytes_per_step"] == row["predicted_bytes_per_step"]
        # Headers of TCP, IP and Ethernet, acknowledgements and Gloo's own, on a step of a few hundred kilobytes.
        assert 1.0 <= row["wire_bytes_per_step"] / row["counted_bytes_per_step"] < 1.15
    assert ddp["wire_bytes_per_step"] == pytest.approx(lossless["wire_bytes_per_step"], rel=0.05)
    assert lossy["speedup_over_ddp"] > 1.1
    assert hook["strategy"] == "torch DDP + fp16 hook"
    assert hook["wire_bytes_per_step"] == pytest.approx(lossy["wire_bytes_per_step"], rel=0.05)
    assert hook["predicted_bytes_per_step"] is None


def _until_ctrl_c(folder: Path) -> tuple[int, list[int]]:
    """The exit code of a run that is interrupted, and its ranks."""
    with Command(["compare", *ALONE, "--steps", "4000", "--output", str(folder / "run")], folder / "output") as process:
        assert eventually(lambda: re.search(r"step +10/4000", process.stderr) is not None, 60), process.stderr
        ranks = ranks_of(folder / "run")
        process.send_signal(signal.SIGINT)
        return process.wait(60), ranks


def _on_a_full_disk(folder: Path) -> RankResult:
    # A limit on the size of files is met at the same calls as the end of a disk.
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); "
    words = ["compare", *ALONE, "--steps", "100", "--output", str(folder / "run")]
    code = f"{limit}import sys; from laconic.cli import main; sys.exit(main(arguments['words']))"
    (done,) = run_processes(code, world_size=1, arguments={"words": words}, may_fail=True, timeout_s=100)
    return done


def _at_a_taken_port(folder: Path) -> tuple[RankResult, int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = ["compare", *ALONE, "--output", str(folder / "run")]
        code = (
            "import sys; from laconic.cli import main; from laconic.lab import launch; "
            "launch.free_port = lambda: arguments['port']; sys.exit(main(arguments['words']))"
        )
        arguments = {"words": words, "port": port}
        (done,) = run_processes(code, world_size=1, arguments=arguments, may_fail=True, timeout_s=100)
    return done, port


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Future]]]:
    """Runs that end early, all at the same time, each in a folder of its own."""
    folder = tmp_path_factory.mktemp("ends")
    ways = {"ctrl-c": _until_ctrl_c, "full disk": _on_a_full_disk, "taken port": _at_a_taken_port}
    with ThreadPoolExecutor(len(ways)) as pool:
        yield folder, {name: pool.submit(way, folder / name) for name, way in ways.items()}


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(120)
def test_ctrl_c_keeps_what_was_measured(ends: tuple[Path, dict[str, Future]]) -> None:
    folder, begun = ends
    exit_code, ranks = begun["ctrl-c"].result()
    assert exit_code == 130
    document = json.loads((folder / "ctrl-c" / "run" / "results.json").read_text())
    assert document["problem"] == "interrupted from the keyboard"
    assert len(ranks) == 1
    assert eventually(lambda: not any(map(is_running, ranks)), 10)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(120)
def test_a_full_disk_is_one_clear_error(ends: tuple[Path, dict[str, Future]]) -> None:
    done = ends[1]["full disk"].result()
    assert done.exit_code == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "File too large" in done.stderr
    assert "events.jsonl" in done.stderr


@pytest.mark.dist
@pytest.mark.timeout(120)
def test_a_port_that_is_taken_is_named(ends: tuple[Path, dict[str, Future]]) -> None:
    done, port = ends[1]["taken port"].result()
    assert done.exit_code == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert f"cannot start the process group at 127.0.0.1:{port}" in done.stderr
    assert "EADDRINUSE" in done.stderr or "already in use" in done.stderr


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(120)
def test_replay_takes_compute_or_communication_whichever_is_longer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    workload = tmp_path / "job.json"
    layer = {"forward_s": 0.01, "backward_s": 0.02}
    layers = [
        {"name": f"layer{index}", **layer, "tensors": [{"name": f"layer{index}.weight", "shape": [250, 250]}]}
        for index in range(4)
    ]
    document = {"name": "job", "batch": 1, "source": "made up", "layers": layers}
    workload.write_text(json.dumps(document))
    words = ["--workload", str(workload), "--hosts", "2", "--bandwidth", "100mbit", "--links", "paced", "--steps", "5"]
    strategies = ["bsp-a2a", "wfbp-a2a"]
    with patch.object(run, "run_ranks", forked_ranks):
        assert main(["replay", *words, *strategies, "--json", "--output", str(out)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((out / "results.json").read_text())
    ddp, sequential, overlapped = rows_of(out)
    for row in (ddp, sequential, overlapped):
        assert float(str(row["step_ms"])) >= 120, "forward and backward are slept"
        assert row["final_loss"] is None
    assert sequential["predicted_bytes_per_step"] == 4 * 250 * 250 * 4
    # 1 MB at 100 Mbit/s is 80 ms after 120 ms of compute; overlapped, all but the last layer's hides behind it.
    assert float(str(sequential["exposed_ms"])) > 60
    assert float(str(overlapped["step_ms"])) < float(str(sequential["step_ms"])) - 20
    assert json.loads((out / "results.json").read_text())["kind"] == "replay"


TOO_LARGE = "bsp / all_reduce / powersgd(rank=4000) + error_feedback / fusion"


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(120)
@pytest.mark.parametrize("command", ["compare", "replay"])
def test_a_strategy_that_attach_refuses_is_reported_and_the_others_run(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # Beside a parameter server, whose last words were shown instead of the reason.
    out, strategies = tmp_path / "run", ["bsp-ps", TOO_LARGE, "bsp-a2a"]
    words = ["--size", "tiny", "--batch", "1", "--bandwidth", "unlimited"]
    if command == "replay":
        workload = tmp_path / "job.json"
        vector = {"name": "layer.bias", "shape": [250]}
        layers = [{"name": "layer", "forward_s": 0.001, "backward_s": 0.002, "tensors": [vector]}]
        workload.write_text(json.dumps({"name": "job", "batch": 1, "source": "made up", "layers": layers}))
        words = ["--workload", str(workload), "--bandwidth", "1gbit", "--links", "paced"]
    with patch.object(run, "run_ranks", forked_ranks):
        assert main([command, *words, "--hosts", "2", "--steps", "3", *strategies, "--output", str(out)]) == 0
    captured = capsys.readouterr()
    told = "powersgd.rank=4000 compresses no parameter of this model"
    assert "is left out" in captured.err
    for text in (captured.err, " ".join(captured.out.split()), (out / "report.html").read_text()):
        assert told in text
    assert [row["strategy"] for row in rows_of(out)] == [
        "torch DDP",
        "bsp / parameter_server / none / sequential",
        "bsp / all_reduce / none / sequential",
    ]
    assert {row["steps"] for row in rows_of(out)} == {3}
    document = json.loads((out / "results.json").read_text())
    assert document["problem"] is None
    assert [refused["strategy"] for refused in document["refused"]] == [TOO_LARGE]
    assert told in document["refused"][0]["reason"]
    assert main(["report", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["refused"] == document["refused"]


def test_the_first_failure_is_the_one_that_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def failing(
        command: Sequence[str],
        places: Sequence[Place],
        *,
        timeout_s: float,
        environment: Mapping[str, str],
        on_line: Callable[[int, str], None],
    ) -> None:
        for rank, time_s, error in ((0, 9.0, "PeerLost: rank 1 is gone"), (1, 8.5, "UsageError: the disk is full")):
            on_line(rank, json.dumps({"failure": {"rank": rank, "time_s": time_s, "error": error}}))
        on_line(1, "server 0 of rank 1: server 0 of rank 1 ends, because that rank has ended")
        raise RankFailed("rank 0 of 2 ended with signal SIGABRT; it last said: goodbye", exit_code=134)

    with patch.object(run, "run_ranks", failing):
        assert main(["compare", *SMALL, "--bandwidth", "unlimited", "--output", str(tmp_path / "run")]) == 2
    assert "laconic: error: rank 1 of 2 failed: UsageError: the disk is full\n" in capsys.readouterr().err


@pytest.mark.parametrize(("steps", "rarely"), [(6, False), (17, False), (18, True), (None, True)])
def test_the_list_by_default_holds_what_exchanges_something_in_so_many_steps(steps: int | None, rarely: bool) -> None:
    found = default_strategies(steps)
    assert any("streaming_diloco" in text for text in found) == rarely
    assert {"ddp", "powersgd", "demo-int4"} <= set(found)
