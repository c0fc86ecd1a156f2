"""`laconic serve`: options, and a real server that real ranks train against."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.processes import ROOT, getting_ctrl_c, run_processes
from tests.runtime.replicas import assert_equal

from laconic.cli import main
from laconic.core.frames import new_token
from laconic.runtime.servers.server_pool import TOKEN_VARIABLE

TOKEN = "0123456789abcdef" * 2


def test_a_new_token_every_time(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = []
    for _ in range(2):
        assert main(["serve", "--new-token"]) == 0
        tokens.append(capsys.readouterr().out.strip())
    assert all(len(bytes.fromhex(token)) == 16 for token in tokens)
    assert tokens[0] != tokens[1]


@pytest.mark.parametrize(
    ("words", "token", "told"),
    [
        (["serve"], "", "LACONIC_TOKEN must hold 32 hex digits"),
        (["serve"], "secret", "LACONIC_TOKEN must hold 32 hex digits"),
        (["serve", "--token-file", "nowhere"], "", "--token-file nowhere cannot be read"),
        (["serve", "--port", "70000"], "", "--port must be from 0 to 65535, got 70000"),
        (["serve", "--new-token", "--once"], "", "--new-token starts no server"),
        (["serve", "--host", "0.0.0.0"], TOKEN, 'all interfaces of this host, got the address "0.0.0.0"'),
        (["serve", "--host", "0"], TOKEN, 'all interfaces of this host, got the address "0"'),
        (["serve", "--host", "no.such.host.invalid"], TOKEN, "cannot listen on no.such.host.invalid:29600"),
    ],
)
def test_what_cannot_be_served(
    words: list[str], token: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "secret" not in error


@contextmanager
def serving(token: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The command as a process of its own, and the lines it has printed; the first says where it listens."""
    with getting_ctrl_c():
        process = subprocess.Popen(
            [sys.executable, "-m", "laconic.cli", "serve", "--port", "0", *options],
            env={**os.environ, TOKEN_VARIABLE: token},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
    lines: list[str] = []
    first = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            first.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert first.wait(60), "it never said where it listens"
        yield process, lines
    finally:
        process.kill()
        process.wait(10)
        reader.join(10)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(120)
def test_two_jobs_in_a_row_and_ctrl_c() -> None:
    token = new_token().hex()
    with serving(token) as (process, lines):
        where = lines[0].removeprefix("listening on ")
        for architecture in (f'in_network(hosts="{where}")', f'parameter_server(hosts="{where}")'):
            results = run_processes(
                "tests.runtime.servers.ranks:against",
                world_size=2,
                arguments={"strategy": f"bsp / {architecture}", "steps": 4},
                environment={TOKEN_VARIABLE: token},
            )
            assert_equal(results[0].value["model"], results[1].value["model"])
            # On a shared scale values are rounded otherwise.
            torch.testing.assert_close(results[0].value["model"], results[0].value["usual"], rtol=1e-5, atol=1e-6)
        assert_equal(results[0].value["model"], results[0].value["usual"])
        wrong = run_processes(
            "tests.runtime.servers.ranks:turned_away",
            world_size=2,
            arguments={"strategy": f"bsp / {architecture}"},
            environment={TOKEN_VARIABLE: new_token().hex()},
        )
        for result in wrong:
            assert f"server 0 at {where}" in result.value
            assert "a frame carries another token than this job's" in result.value
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    said = [line for line in lines if not line.startswith("server")]
    served = [
        line
        for name in ("in_network", "parameter_server")
        for line in (f"listening on {where}", f"configured by rank 0 for 2 workers: bsp / {name}", "job ended")
    ]
    assert [line.partition("(hosts")[0] for line in said] == [*served, f"listening on {where}"]
    assert any("another token than this job's" in line for line in lines)
