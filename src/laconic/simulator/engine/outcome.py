"""What became of a graph: when every task started and ended, and what it waited for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from laconic.errors import UsageError


@dataclass(frozen=True, eq=False)
class Outcome:
    """One run of a graph. Times count from its beginning."""

    start_s: npt.NDArray[np.float64]
    """Of each task: when it had its resource, if it wants one, and not only its predecessors' results."""
    end_s: npt.NDArray[np.float64]
    waited_for: npt.NDArray[np.int64]
    """Of each task: the one whose end let it start, be it its last predecessor or the task that held its resource until
    then; -1 where it started at time 0 by itself."""
    busy_s: npt.NDArray[np.float64]
    """Of each resource: how long it was held, added up over its tasks."""
    link_bytes: npt.NDArray[np.float64]
    """Of each link of the fabric: what crossed it. Empty without a fabric."""

    @property
    def makespan_s(self) -> float:
        """When the last task ended."""
        return float(self.end_s.max(initial=0.0))

    def critical_path(self, task: int | None = None) -> list[int]:
        """The tasks that held up `task`, each the next one, from time 0 on; left out: of the task that ended last.

        To make that end sooner, one of these must take less time.
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
