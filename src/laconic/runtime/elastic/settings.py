"""Settings for a set of ranks that may change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from laconic.errors import AttachError


class Carried(Protocol):
    """An object of the training script whose state a joining rank takes over from the others."""

    def state_dict(self) -> dict[str, Any]:
        """Its state as plain values and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Take over a state."""
        ...


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """Continue when ranks die, and let others join: laconic.attach(..., elastic=laconic.Elastic(min_ranks=2)).

    Processes are started by `laconic run`, which replaces those that are killed. If the model is sharded, a replica has
    several ranks, and the numbers of ranks below are numbers of replicas.
    """

    min_ranks: int = 1
    """With fewer ranks than this the job ends."""
    max_ranks: int | None = None
    """The job takes no more ranks than this; None: any number."""
    batch: Literal["global", "local"] = "global"
    """The meaning of the batch size of a loader given to session.batches(). global: of all ranks together, divided
    among the current ranks. local: of each rank, also of each that shares a replica with others."""
    balance: bool = False
    """Give faster ranks more samples of each step, so that all finish at about the same time; the batch of all ranks
    together stays the same. Needs session.batches(), `laconic run` and batch="global"."""
    carry: Sequence[Carried] = ()
    """Objects whose state joining ranks take over, such as a learning rate scheduler."""

    def __post_init__(self) -> None:
        if isinstance(self.min_ranks, bool) or not isinstance(self.min_ranks, int) or self.min_ranks < 1:
            raise AttachError(f"elastic.min_ranks must be a whole number >= 1, got {self.min_ranks!r}.")
        if self.max_ranks is not None and (not isinstance(self.max_ranks, int) or self.max_ranks < self.min_ranks):
            raise AttachError(f"elastic.max_ranks must be >= min_ranks ({self.min_ranks}), got {self.max_ranks!r}.")
        if self.batch not in ("global", "local"):
            raise AttachError(f'elastic.batch must be "global" or "local", got {self.batch!r}.')
        if self.balance and self.batch != "global":
            raise AttachError('elastic.balance divides the batch of all ranks: it needs batch="global".')
        for one in self.carry:
            if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
                raise AttachError(
                    f"elastic.carry holds a {type(one).__name__}, which has no state_dict() and load_state_dict()."
                )
