"""The ranks of this rank's replica: where the model is sharded, they leave a joint operation together.

Ranks of a replica wait for each other in every pass (FSDP's collectives). If one of them went on to the next forward
pass while another asked for the next view, the first would wait for the second there, and the second for the first in
the next view, forever. So after every attempt of a joint operation these ranks tell each other whether it succeeded.
They do so in a process group of their own, which lives as long as all of them do and does not depend on views.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from laconic.errors import PeerLost, one_line
from laconic.membership.view import ViewBroken


class ReplicaRanks:
    """The ranks that hold one copy of the model together; this rank alone, unless the model is sharded."""

    def __init__(self, group: dist.ProcessGroup | None, *, timeout_s: float) -> None:
        """group: over CPU tensors; None: this rank alone."""
        self._group = group
        self._timeout_s = timeout_s
        self._waits = False
        """Whether an operation has not ended well: the group is then left to the end of the process."""

    @classmethod
    def of_this_process(cls, count: int, *, timeout_s: float) -> ReplicaRanks:
        """The ranks of the default process group, if there are several; each of them calls this."""
        if count == 1:
            return cls(None, timeout_s=timeout_s)
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup), "this rank is in it"
        return cls(group, timeout_s=timeout_s)

    @property
    def are_several(self) -> bool:
        """Whether there are other ranks."""
        return self._group is not None

    def common(self, problem: ViewBroken | None) -> ViewBroken | None:
        """Why the last attempt failed on this rank, or on another one of its replica; None: on none of them."""
        if self._group is None:
            return problem
        failed = torch.tensor([int(problem is not None)])
        self._waits = True
        try:
            work = dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
            assert work is not None, "asynchronous"
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as exc:
            before = "" if problem is None else f" Before: {problem}"
            raise PeerLost(
                f"another rank of this replica is gone, or did not come within {self._timeout_s:g} s "
                f"({one_line(exc, 120)}). The ranks of a replica end together.{before}"
            ) from exc
        self._waits = False
        if problem is None and failed.item():
            return ViewBroken("another rank of this replica has lost the view")
        return problem

    def close(self) -> None:
        """Release the group, without waiting for other ranks."""
        group, self._group = self._group, None
        if group is not None and not self._waits:
            dist.destroy_process_group(group)
