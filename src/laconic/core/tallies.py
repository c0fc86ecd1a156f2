"""Counters that all ranks of a job share, kept in its store, for information that no rank waits for."""

from __future__ import annotations

import torch.distributed as dist

from laconic.core.heartbeat import Heartbeat


class Tallies:
    """The shared counters of one process group."""

    def __init__(self, store: dist.Store, heartbeat: Heartbeat) -> None:
        self._store = dist.PrefixStore("tallies", store)
        self._heartbeat = heartbeat

    def add(self, name: str, amount: int) -> int:
        """Add to a counter and return its value; when this returns, the others can read the sum."""
        # The store answers, unlike after `set`, so later readers get at least this value.
        return self._heartbeat.in_time(lambda: self._store.add(name, amount), f'counter "{name}"')

    def drop(self, name: str) -> None:
        """Remove a counter."""
        self._heartbeat.in_time(lambda: self._store.delete_key(name), f'counter "{name}"')
