"""Records which durations come from the network, so that the same tasks can be run on links of other speeds.

    duration of a task = sum of factor x field of a passage

Building a graph takes a hundred times as long as running it. Where other links have the same segments, only durations
differ.
"""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from laconic.core.exchange import Move
from laconic.simulator.network import Network, Passage

Term = tuple[int, int, str | int]
"""Move number, passage number, field; a number in place of the field means one of the passage's other links."""


class Prices:
    """The durations that a graph has taken from the network."""

    def __init__(self) -> None:
        self._moves: dict[Move, int] = {}
        self._shapes: list[tuple[object, ...]] = []
        self._slots: dict[Term, int] = {}
        self._task, self._slot, self._factor = array("q"), array("q"), array("d")
        self.complete = True
        """False: some tasks depend on the network in another way."""

    def drawn(self, move: Move, passages: tuple[Passage, ...]) -> int:
        """Record a move with these segments; returns its number."""
        number = self._moves.setdefault(move, len(self._shapes))
        if number == len(self._shapes):
            self._shapes.append(_shape(passages))
        return number

    def note(self, task: int, term: Term, factor: float) -> None:
        """Add `factor` times this field to the duration of the task."""
        self._task.append(task)
        self._slot.append(self._slots.setdefault(term, len(self._slots)))
        self._factor.append(factor)

    def durations_s(
        self, before_s: npt.NDArray[np.float64], network: Network, world_size: int, num_servers: int
    ) -> npt.NDArray[np.float64] | None:
        """The durations of all tasks on another network; None if its tasks would differ."""
        if not self.complete:
            return None
        found = [network.passages(move, world_size, num_servers) for move in self._moves]
        if [_shape(passages) for passages in found] != self._shapes:
            return None
        values = np.array([_value(found[move][index], field) for move, index, field in self._slots])
        tasks, durations_s = np.frombuffer(self._task, dtype=np.int64), before_s.copy()
        if len(tasks):
            durations_s[tasks] = 0.0
            slots, factors = np.frombuffer(self._slot, dtype=np.int64), np.frombuffer(self._factor)
            np.add.at(durations_s, tasks, values[slots] * factors)
        return durations_s


def _shape(passages: tuple[Passage, ...]) -> tuple[object, ...]:
    """The properties of segments that decide which tasks are added."""
    return tuple(
        (
            one.where,
            one.answer,
            bool(one.issue_s),
            bool(one.startup_s),
            bool(one.latency_s),
            bool(one.rank_s),
            bool(one.launch_s),
            tuple(where for where, _ in one.beside),
        )
        for one in passages
    )


def _value(passage: Passage, field: str | int) -> float:
    return passage.beside[field][1] if isinstance(field, int) else getattr(passage, field)
