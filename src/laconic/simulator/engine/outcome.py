"""The result of a run: when every task started and ended, and what it waited for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from laconic.errors import UsageError


@dataclass(frozen=True, eq=False)
class Outcome:
    """One run of a graph. Times count from its beginning."""

    start_s: npt.NDArray[np.float64]
    """When each task started: its predecessors had ended and, if it needs one, its resource was free."""
    end_s: npt.NDArray[np.float64]
    waited_for: npt.NDArray[np.int64]
    """For each task, the one whose end let it start: its last predecessor, or the task that held its resource until
    then; -1 where it started at time 0."""
    busy_s: npt.NDArray[np.float64]
    """How long each resource was held, summed over its tasks."""
    link_bytes: npt.NDArray[np.float64]
    """The bytes that crossed each link of the fabric. Empty without a fabric."""

    @property
    def makespan_s(self) -> float:
        """When the last task ended."""
        return float(self.end_s.max(initial=0.0))

    def critical_path(self, task: int | None = None) -> list[int]:
        """The chain of tasks from time 0 that `task` waited for; default: that of the task that ended last.

        To end it sooner, one of these must take less time.
        """
        if task is None:
            if not len(self.end_s):
                return []
            task = int(self.end_s.argmax())
        if not 0 <= task < len(self.end_s):
            raise UsageError(f"critical_path: task must be between 0 and {len(self.end_s) - 1}, got {task}.")
        path = []
        while task >= 0:
            path.append(task)
            task = int(self.waited_for[task])
        return path[::-1]
