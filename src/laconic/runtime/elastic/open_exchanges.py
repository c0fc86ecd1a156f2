"""Submitted exchanges of units that are not done yet: each can be undone, and repeated in another view."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from laconic.core.exchange import Exchange
from laconic.core.stateful import BucketState
from laconic.runtime.elastic.undo import Undo
from laconic.runtime.engine import Engine, Task


@dataclass
class _Open:
    task: Task
    again: Callable[[], Task]
    """Makes an equal task for another engine."""
    flat: torch.Tensor
    state: BucketState
    undo: Undo
    taken: bool = False

    def restore(self) -> None:
        if self.taken:
            self.undo.put_back(self.flat, self.state)


class OpenExchanges:
    """The open exchanges of one session."""

    def __init__(self, share: Callable[[], float]) -> None:
        """share: this rank's weight in a mean over the ranks of the current view, asked when an exchange starts."""
        self._share = share
        self._open: list[_Open] = []

    @property
    def tasks(self) -> list[Task]:
        """The tasks of the open exchanges."""
        return [entry.task for entry in self._open]

    def add(self, task: Task, again: Callable[[], Task], flat: torch.Tensor, state: BucketState) -> None:
        """Keep the values that are needed to undo a task, from its start on."""
        entry = _Open(task, again, flat, state, Undo.of(state))
        task.start = self._guarded(entry, task.start)
        self._open.append(entry)

    def _guarded(self, entry: _Open, start: Callable[[], Exchange]) -> Callable[[], Exchange]:
        def guarded() -> Exchange:
            if not entry.taken:
                entry.undo.take(entry.flat, entry.state)
                entry.taken = True
            share = self._share()
            if share != 1.0:
                entry.flat *= share
            return start()

        return guarded

    def count(self, tasks: Sequence[Task]) -> None:
        """The exchanges of these tasks are done: they are never undone."""
        self._open = [entry for entry in self._open if all(entry.task is not task for task in tasks)]

    def restore(self, but: Sequence[Task]) -> None:
        """Restore gradients and their state to the values before each exchange except these."""
        for entry in self._without(but):
            entry.restore()

    def submit_again(self, engine: Engine, but: Sequence[Task]) -> None:
        """Repeat every exchange except these."""
        for entry in self._without(but):
            fresh = entry.again()
            fresh.start = self._guarded(entry, fresh.start)
            entry.task.renew(fresh)
            engine.submit(entry.task)

    def _without(self, tasks: Sequence[Task]) -> list[_Open]:
        return [entry for entry in self._open if all(entry.task is not task for task in tasks)]
