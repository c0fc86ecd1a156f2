"""Run a Python function on N real local processes, as torchrun would, and collect what each of them did.

    results = run_processes("tests.core.gloo_ranks:operations", world_size=3, arguments={"steps": 2}, timeout_s=60)
    results[0].value                     # what the function returned on rank 0

Every process gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and one thread. The
target is "module:function", called with `arguments` as keywords, or the text of a script. A function's return value
comes back through torch.save, so it holds tensors and plain containers; a script finds `arguments` as a global and may
write JSON or torch.save to the path in the global `result_file`. A rank that fails, or a run that outlasts `timeout_s`,
fails the test with the output of all ranks; nothing that was started here survives the call.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# torch is imported where it is used: a script that does not need it starts in a tenth of a second.
ROOT = Path(__file__).resolve().parent.parent
_POLL_S = 0.02
_SHOWN_CHARACTERS = 4000
"""How much of each rank's output a failure message carries, from its end."""


@dataclass(frozen=True)
class SignalAfterLine:
    """Send `signal` to `rank` once it has printed a line that equals `line`."""

    rank: int
    line: str
    signal: signal.Signals = signal.SIGKILL


@dataclass(frozen=True)
class RankResult:
    """What one process did."""

    rank: int
    exit_code: int
    """As subprocess gives it: -9 after a kill -9."""
    stdout: str
    stderr: str
    value: Any
    """What the function returned or the script wrote; None if it did not come that far."""
    ended_s: float
    """Seconds from the start of the run to the end of this process."""


def run_processes(
    target: str,
    *,
    world_size: int,
    arguments: Mapping[str, object] | None = None,
    timeout_s: float = 60.0,
    send_signal: SignalAfterLine | None = None,
    may_fail: bool = False,
    environment: Mapping[str, str] | None = None,
) -> list[RankResult]:
    """Run `target` on `world_size` processes and return one result per rank, in rank order.

    Unless `may_fail`, every rank must exit with 0, except the one `send_signal` names.
    """
    started_s = time.monotonic()
    processes: list[subprocess.Popen[bytes]] = []
    ended_s: dict[int, float] = {}
    name = target if _is_function(target) else "a script"
    with tempfile.TemporaryDirectory(prefix="laconic-ranks-") as temporary:
        folder = Path(temporary)
        (folder / "task.json").write_text(json.dumps({"target": target, "arguments": dict(arguments or {})}))
        port = _free_port()
        try:
            for rank in range(world_size):
                processes.append(_start(folder, rank, world_size, port, environment or {}))
            pending = send_signal
            # A rank that is stopped, not ended, by its signal is not waited for.
            stopped = {send_signal.rank} if send_signal and send_signal.signal == signal.SIGSTOP else set()
            while set(range(world_size)) - set(ended_s) - stopped:
                for rank, process in enumerate(processes):
                    if rank not in ended_s and process.poll() is not None:
                        ended_s[rank] = time.monotonic() - started_s
                if pending is not None and pending.line in _read(folder, pending.rank, "out").splitlines():
                    processes[pending.rank].send_signal(pending.signal)
                    pending = None
                if time.monotonic() - started_s > timeout_s:
                    break
                time.sleep(_POLL_S)
        finally:
            for process in processes:
                # A group of its own, so that what a rank has started ends with it.
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        results = [
            RankResult(
                rank=rank,
                exit_code=process.returncode,
                stdout=_read(folder, rank, "out"),
                stderr=_read(folder, rank, "err"),
                value=_value(folder / f"{rank}.result"),
                ended_s=ended_s.get(rank, time.monotonic() - started_s),
            )
            for rank, process in enumerate(processes)
        ]
    running = [rank for rank in range(world_size) if rank not in ended_s and rank not in stopped]
    if running:
        raise AssertionError(f"ranks {running} of {name} still ran after {timeout_s:g} s.{_shown(results)}")
    if pending is not None:
        raise AssertionError(f"rank {pending.rank} of {name} never printed {pending.line!r}.{_shown(results)}")
    struck = send_signal.rank if send_signal is not None else None
    failed = [result.rank for result in results if result.exit_code != 0 and result.rank != struck]
    if failed and not may_fail:
        raise AssertionError(f"ranks {failed} of {name} failed.{_shown(results)}")
    return results


@contextlib.contextmanager
def gloo_group() -> Iterator[None]:
    """The default process group over Gloo, for functions that run_processes calls."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _is_function(target: str) -> bool:
    module, colon, function = target.partition(":")
    return bool(colon) and function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def _free_port() -> int:
    # Another process could take it before rank 0 listens; on a test machine that has not been seen to happen.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(
    folder: Path, rank: int, world_size: int, port: int, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    # An empty entry in PYTHONPATH would mean the current directory.
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *inherited]),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **environment,
    }
    with (folder / f"{rank}.out").open("wb") as out, (folder / f"{rank}.err").open("wb") as err:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.processes", str(folder)],
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )


def _read(folder: Path, rank: int, stream: str) -> str:
    return (folder / f"{rank}.{stream}").read_text(encoding="utf-8", errors="replace")


def _value(path: Path) -> Any:
    if not path.exists():
        return None
    if path.read_bytes()[:2] == b"PK":
        import torch

        return torch.load(path, weights_only=True)
    return json.loads(path.read_text(encoding="utf-8"))


def _shown(results: list[RankResult]) -> str:
    parts = []
    for result in results:
        parts.append(f"\n--- rank {result.rank}, exit code {result.exit_code}, ended after {result.ended_s:.1f} s")
        parts += [text[-_SHOWN_CHARACTERS:].rstrip() for text in (result.stdout, result.stderr) if text.strip()]
    return "\n".join(parts)


def _run_rank(folder: Path) -> None:
    """What every child process does."""
    task = json.loads((folder / "task.json").read_text())
    result_file = folder / f"{os.environ['RANK']}.result"
    if _is_function(task["target"]):
        import torch

        torch.set_num_threads(1)
        module, _, function = task["target"].partition(":")
        value = getattr(importlib.import_module(module), function)(**task["arguments"])
        # Written under another name first: a rank that is killed here must not leave half a file.
        torch.save(value, result_file.with_suffix(".part"))
        result_file.with_suffix(".part").rename(result_file)
    else:
        code = compile(task["target"], "<script>", "exec")
        exec(code, {"__name__": "__main__", "arguments": task["arguments"], "result_file": result_file})


if __name__ == "__main__":
    _run_rank(Path(sys.argv[1]))
