"""`laconic probe`: options, and two real ranks that measure each other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.processes import run_processes

from laconic.cli import main
from laconic.cluster import Cluster

ON_HOSTS_OF_THEIR_OWN = """
import os, sys
from laconic.cli import main

os.environ["LACONIC_HOST"] = "host-" + os.environ["RANK"]
sys.exit(main(arguments["words"]))
"""
INSIDE_A_JOB = """
import sys
import torch.distributed as dist
from laconic.cli import main

dist.init_process_group("gloo")
assert main(["probe", "--json", "--sizes", "1KiB", "2KiB"]) == 0
codes = [main(["probe", "--backend", "gloo"]), main(arguments["words"])]
assert dist.is_initialized(), "the job's group is not ours to end"
dist.destroy_process_group()
assert codes == [2, 2], codes
"""


@pytest.mark.parametrize(
    ("words", "variables", "told"),
    [
        ([], {}, "RANK is not set here. Start it with: torchrun --nproc-per-node 4 -m laconic.cli probe"),
        ([], {"RANK": "0"}, "WORLD_SIZE is not set here"),
        (
            [],
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "nothing to measure with one rank",
        ),
        (["--limit", "soon"], {}, '--limit must be a time such as 5ms, got "soon"'),
        (["--limit", "0s"], {}, "--limit must be above 0"),
        (["--timeout", "2000h"], {}, "--timeout must be above 0 and at most a day"),
        (["--sizes", "1m"], {}, "--sizes must be a size"),
        (["--bandwidth", "fast"], {}, "--bandwidth must be a rate"),
        (["--bandwidth", "0"], {}, "bandwidth must be between 1kbit and 10tbit per second"),
        (["--bandwidth", "10"], {}, "bandwidth must be between 1kbit and 10tbit per second, got 10.0bit"),
        (["--backend", "mpi"], {}, "--backend"),
        (["--ouput", "a.toml"], {}, 'Did you mean "--output"'),
    ],
)
def test_what_cannot_be_measured(
    words: list[str],
    variables: dict[str, str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["probe", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.dist
@pytest.mark.timeout(120)
def test_two_ranks_write_a_cluster_that_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "pair.toml"
    words = ["probe", "--output", str(path), "--sizes", "1KiB", "16KiB", "256KiB", "--limit", "30s", "--pairs"]
    results = run_processes(
        ON_HOSTS_OF_THEIR_OWN,
        world_size=2,
        arguments={"words": [*words, "--algorithms", "ring", "--bandwidth", "1gbit"]},
        # Held back, so that something is known about the times.
        environment={"LACONIC_PACE": "1gbit"},
    )
    made = Cluster.load(path)
    assert (made.name, made.num_hosts, made.devices_per_host) == ("pair", 2, 1)
    assert made.links[0].bandwidth_bps == 1e9
    assert made.source.startswith("Measured by laconic probe on ")
    measured = made.measured
    assert measured is not None
    assert "gloo" in measured.transport
    assert "paced at 1gbit" in measured.transport
    kinds = ["all_reduce", "all_reduce(ring)", "all_gather", "all_to_all", "send"]
    assert [curve.kind for curve in measured.curves] == kinds
    assert measured.curves[0].sizes == (1024, 16_384, 262_144)
    # At least what the link takes: 256 KiB at 125 bytes per microsecond.
    assert measured.seconds("send", 262_144).seconds >= 0.0020
    assert len(measured.pairs_bps) == 2
    said = results[0].stdout.splitlines()
    assert said[0].startswith("2 hosts at 1gbit, delay ")
    assert said[3].split()[-2:] == ["of", "stated"]
    assert all(re.fullmatch(r"\d+%", line.split()[-1]) for line in said[4:9])
    assert [line.split()[0] for line in said[4:9]] == kinds
    assert "slowest pair while all exchange: ranks 0 and 1" in results[0].stdout
    assert "probe: 16.0 KiB: all_reduce " in results[0].stderr
    assert f"written to {path}" in results[0].stderr
    assert results[1].stdout == ""


@pytest.mark.dist
@pytest.mark.timeout(120)
def test_inside_a_job_a_rank_that_cannot_go_on_tells_the_others(tmp_path: Path) -> None:
    words = ["probe", "--output", str(tmp_path / "nowhere" / "a.toml"), "--timeout", "30s"]
    results = run_processes(INSIDE_A_JOB, world_size=2, arguments={"words": words})
    shown = json.loads(results[0].stdout)
    assert (shown["hosts"], shown["devices_per_host"], shown["pairs_bps"]) == (1, 2, [])
    assert [curve["sizes"] for curve in shown["curves"]] == [[1024, 2048]] * 4
    assert all(curve["startup_s"] >= 0 and curve["plateau_sent_bps"] > 0 for curve in shown["curves"])
    assert "--backend has no effect inside a job" in results[0].stderr
    assert "there is no folder" in results[0].stderr
    # Rank 1 could write wherever it likes; it learns what stopped rank 0, and does not wait for it.
    assert "rank 0" in results[1].stderr
    assert "there is no folder" in results[1].stderr
    assert results[1].ended_s < 25
