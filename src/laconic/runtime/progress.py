"""How far a job has come in its data: the same on all ranks, taken over by ranks that join, and saved."""

from __future__ import annotations

from dataclasses import dataclass

Position = tuple[int, int]
"""An epoch, and the number of its samples that have been used."""


@dataclass
class Progress:
    """The position in the data, and what this process knows about it."""

    position: Position = (0, 0)
    asked: int = 0
    """The largest number of epochs that this process has asked for."""
    data: int = 0
    """A number that stands for the samples and their order; 0: not known yet."""
    loads: int = 0
    """How often a saved position has been loaded."""

    def load(self, position: Position) -> None:
        """Continue from a saved position; a loop over batches does so after its current batch."""
        self.position, self.asked = position, 0
        self.loads += 1
