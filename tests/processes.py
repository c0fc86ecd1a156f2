"""Run a Python function on N real local processes, as torchrun would, and collect what each of them did.

    results = run_processes("tests.core.gloo_ranks:operations", world_size=3, arguments={"steps": 2}, timeout_s=60)
    results[0].value                     # what the function returned on rank 0

Every process gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and one thread. The
target is "module:function", called with `arguments` as keywords, or the text of a script. A function's return value
comes back through torch.save, so it holds tensors and plain containers; a script finds `arguments` as a global and may
write JSON or torch.save to the path in the global `result_file`. A rank that fails, or a run that outlasts `timeout_s`,
fails the test with the output of all ranks; nothing that was started here survives the call.

Processes are forked from one that has torch loaded already: loading it takes seconds, and there are few cores. So are
commands, which are `laconic` with some words as a shell would start it:

    with Command(["lab", "--hosts", "2", "--", "sleep", "60"], tmp_path) as lab:
        lab.send_signal(signal.SIGINT)
        assert lab.wait(30) == 130
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent
_POLL_S = 0.02
_SHOWN_CHARACTERS = 4000
"""How much of each rank's output a failure message carries, from its end."""
# Starting a process also looks whether others have ended, and how one ended can be read only once.
_children = threading.Lock()


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
    processes: list[ForkServerProcess] = []
    ended_s: dict[int, float] = {}
    name = target if _is_function(target) else "a script"
    with tempfile.TemporaryDirectory(prefix="laconic-ranks-") as temporary:
        folder = Path(temporary)
        (folder / "task.json").write_text(json.dumps({"target": target, "arguments": dict(arguments or {})}))
        port = _free_port()
        try:
            for rank in range(world_size):
                variables = {**_torchrun(rank, world_size, port), **(environment or {})}
                processes.append(_start(_be_rank, folder, rank, variables))
            pending = send_signal
            # A rank that is stopped, not ended, by its signal is not waited for.
            stopped = {send_signal.rank} if send_signal and send_signal.signal == signal.SIGSTOP else set()
            while set(range(world_size)) - set(ended_s) - stopped:
                for rank, process in enumerate(processes):
                    if rank not in ended_s and _exit_code(process) is not None:
                        ended_s[rank] = time.monotonic() - started_s
                if pending is not None and pending.line in _read(folder, pending.rank, "out").splitlines():
                    os.kill(_pid(processes[pending.rank]), pending.signal)
                    pending = None
                if time.monotonic() - started_s > timeout_s:
                    break
                time.sleep(_POLL_S)
        finally:
            for process in processes:
                # A group of its own, so that what a rank has started ends with it.
                if _exit_code(process) is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(_pid(process), signal.SIGKILL)
                while _exit_code(process) is None:
                    time.sleep(_POLL_S)
        results = [
            RankResult(
                rank=rank,
                exit_code=_known(_exit_code(process)),
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


def start_together(runs: Mapping[str, Mapping[str, Any]], *, at_once: int = 3) -> dict[str, Future[list[RankResult]]]:
    """Begin several runs, each given by the arguments of run_processes; for those that mostly wait for a time limit."""
    with_threads = ThreadPoolExecutor(at_once)
    begun = {name: with_threads.submit(run_processes, **arguments) for name, arguments in runs.items()}
    with_threads.shutdown(wait=False)
    return begun


class Command:
    """One `laconic` with words, its output in files under `folder`."""

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._process = _start(_be_command, folder, list(words))
        self.pid = _pid(self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def stderr(self) -> str:
        """What it has said so far."""
        return _read(self._folder, 0, "err")

    @property
    def exit_code(self) -> int | None:
        """As subprocess gives it; None while it runs."""
        return _exit_code(self._process)

    def send_signal(self, number: signal.Signals) -> None:
        """To it alone."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it, if it still runs."""
        self.send_signal(signal.SIGKILL)
        self.wait(30)

    def wait(self, timeout_s: float) -> int:
        """Its exit code, once it has ended."""
        assert eventually(lambda: self.exit_code is not None, timeout_s), f"still running.\n{self.stderr}"
        return _known(self.exit_code)


def is_running(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def eventually(condition: Callable[[], bool], within_s: float = 30) -> bool:
    """Whether something becomes true in time."""
    until_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(_POLL_S)
    return True


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
    # Only now: processes that are forked from here must not have loaded the lab, which some tests ask about.
    from laconic.lab.launch import free_port

    return free_port()


@functools.cache
def _nursery() -> ForkServerContext:
    """Where processes come from: one that has loaded what every rank needs, and forks."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded
    context = multiprocessing.get_context("forkserver")
    # torch._dynamo: the first optimizer step would load it, for as long as torch itself takes.
    context.set_forkserver_preload(
        ["torch", "torch.distributed", "torch._dynamo", "numba", "laconic.runtime", "tests.processes"]
    )
    return context


def warm_up() -> None:
    """Begin to load what ranks need, and return at once."""
    _nursery()
    forkserver.ensure_running()


def _torchrun(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _start(target: Callable[..., None], *arguments: object) -> ForkServerProcess:
    with _children:
        process = _nursery().Process(target=target, args=arguments)
        process.start()
    return process


def _pid(process: ForkServerProcess) -> int:
    return _known(process.pid)


def _exit_code(process: ForkServerProcess) -> int | None:
    with _children:
        return process.exitcode


def _known(number: int | None) -> int:
    assert number is not None
    return number


def _read(folder: Path, rank: int, stream: str) -> str:
    path = folder / f"{rank}.{stream}"
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


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


def _be_rank(folder: Path, rank: int, variables: dict[str, str]) -> None:
    """What the process of a rank does: become one, then run the target."""
    _stand_alone(folder, rank)
    os.environ.update(variables)
    _run_target(folder, folder / f"{rank}.result")


def _be_command(folder: Path, words: list[str]) -> None:
    """What the process of a command does."""
    _stand_alone(folder, 0)
    with getting_ctrl_c():
        from laconic.cli import main

        sys.exit(main(words))


@contextlib.contextmanager
def getting_ctrl_c() -> Iterator[None]:
    """This process and those that it starts meanwhile get SIGINT as they do on a terminal, in the main thread only.

    A shell lets the commands that it runs in the background ignore SIGINT, and so do all processes that they start.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _stand_alone(folder: Path, rank: int) -> None:
    os.setsid()
    os.chdir(ROOT)
    for number, stream in ((1, "out"), (2, "err")):
        with (folder / f"{rank}.{stream}").open("wb") as file:
            os.dup2(file.fileno(), number)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _run_target(folder: Path, result_file: Path) -> None:
    task = json.loads((folder / "task.json").read_text())
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
