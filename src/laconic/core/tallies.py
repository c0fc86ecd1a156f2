"""Counters that all ranks of a job share, kept in the job's store: a rank can tell the others something none waits for.

A call to a store whose host has frozen never returns, so each is made in a thread of its own and given up in time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from laconic.core.heartbeat import Heartbeat, job_store
from laconic.errors import one_line

_SLICE_S = 0.5
"""How long a wait sleeps before it looks whether a peer has failed."""


class Tallies:
    """The shared counters of one process group."""

    def __init__(self, group_name: str, heartbeat: Heartbeat, timeout_s: float) -> None:
        self._prefix = f"laconic/tallies/{group_name}"
        self._heartbeat = heartbeat
        self._timeout_s = timeout_s
        self._store: dist.Store | None = None

    def add(self, name: str, amount: int) -> int:
        """Add to a counter and return its value; when this returns, the others find the sum."""
        # The store answers, unlike after `set`: what it has answered, it tells everyone who asks later.
        return self._ask(f'counter "{name}"', lambda store: store.add(name, amount))

    def drop(self, name: str) -> None:
        """Remove a counter."""
        self._ask(f'counter "{name}"', lambda store: store.delete_key(name))

    def _ask(self, what: str, question: Callable[[dist.Store], int]) -> int:
        answers: list[int] = []
        errors: list[RuntimeError] = []

        def ask() -> None:
            try:
                if self._store is None:
                    # A connection of our own, made when it is first needed: most jobs never count anything.
                    self._store = dist.PrefixStore(self._prefix, job_store())
                answers.append(question(self._store))
            except RuntimeError as exc:
                errors.append(exc)

        thread = threading.Thread(target=ask, name="laconic-tally", daemon=True)
        deadline_s = time.monotonic() + self._timeout_s
        thread.start()
        thread.join(_SLICE_S)
        while thread.is_alive():
            self._heartbeat.check(what)
            if time.monotonic() >= deadline_s:
                raise self._heartbeat.explain(what, f"got no answer in {self._timeout_s:g} s", timed_out=True)
            thread.join(_SLICE_S)
        if errors:
            raise self._heartbeat.explain(what, one_line(errors[0])) from errors[0]
        return answers[0]
