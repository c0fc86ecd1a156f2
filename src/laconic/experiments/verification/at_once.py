"""Checks of several strategies at the same time, each in a process whose threads are the workers."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

import torch

from laconic.errors import LaconicError, LaconicWarning
from laconic.experiments.verification.all_checks import verify_on_threads
from laconic.experiments.verification.outcome import Findings
from laconic.strategy import Strategy


def verify_at_once(strategies: Sequence[Strategy], counts: Sequence[int], jobs: int) -> Iterator[Findings]:
    """Check each strategy with each number of workers, `jobs` at a time; yields findings as they come.

    Raises the first error of `verify_on_threads`, and LaconicError if a process is killed. Processes that still run end
    when the caller stops iterating.
    """
    before = set(multiprocessing.active_children())
    # Started anew, not forked: a copy of threads that hold locks would wait for ever.
    spawning = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(strategies) * len(counts)) or 1, spawning, initializer=_begin)
    try:
        # Ctrl-C reaches these processes too; they inherit that it is ignored, and are ended below.
        with ignoring_ctrl_c():
            runs = [pool.submit(_found, str(strategy), workers) for strategy in strategies for workers in counts]
        for run in as_completed(runs):
            yield run.result()
    except BrokenProcessPool as exc:
        raise LaconicError(
            "verify: a process that checked a strategy was killed, perhaps because memory ran out. Give fewer --jobs."
        ) from exc
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        running = set(multiprocessing.active_children()) - before
        for process in running:
            process.terminate()
        for process in running:
            process.join(timeout=5.0)


@contextmanager
def ignoring_ctrl_c() -> Iterator[None]:
    """Ignore SIGINT inside the block; has no effect outside of the main thread, the only one that gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _begin() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _found(text: str, workers: int) -> Findings:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LaconicWarning)
        return verify_on_threads(Strategy.parse(text), workers)
