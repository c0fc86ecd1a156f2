"""Finds parameters that no rank used: such a parameter keeps its gradient unchanged, usually None.

Optimizers treat "no gradient" and "zero gradient" differently (weight decay, momentum), so replicas must agree on it.
If some rank used every parameter, no parameter is unused everywhere. So ranks communicate only when they must:

    quiet    A rank that misses a gradient adds 1 to a shared counter before it sends zeros instead. When all
             exchanges of the pass have ended, every rank has contributed, so each rank that misses a gradient has been
             counted. Fewer than all: some rank used every parameter, so none is unused everywhere. All: the ranks
             see it in the counter, exchange one byte per parameter, and
    asking   repeat that exchange in every pass, until a pass in which some rank used every parameter.

A model whose parameters are all used pays nothing, on a GPU as on a CPU, and no gradient values are read.

An empty shard in a bucket of its own is not exchanged, so the end of the exchanges does not imply that every rank has
been counted. Ranks with such a shard ask in every pass.

Where the set of ranks may change, shared counters do not work. There every pass ends with a vote, in which each rank
says which parameters it used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from laconic.core.exchange import Exchange, one_round
from laconic.runtime.engine import Task
from laconic.runtime.job import Job

_WHAT = "which parameters were used"


class Usage:
    """Exchanges with other ranks which parameters were not used."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._alone = job.transport.world_size == 1
        self._asking = False
        self._asked: _Question | None = None
        self._passes = 0
        self._counter = ""
        self._last_counter = ""
        if job.recovery is not None:
            return
        # A transport may carry one session after another; each rank adds once per session, so all get the same number.
        self._session = 0 if self._alone else (job.transport.tally("sessions", 1) - 1) // job.transport.world_size

    def pass_ended(self, *, missing: bool, must_ask: bool) -> None:
        """The backward pass has ended; called before zeros are sent in place of missing gradients.

        must_ask: a rank may miss a gradient in place of which nothing is sent, so the counter does not suffice; the
            same on all ranks.
        """
        if self._job.recovery is not None:
            return
        self._passes += 1
        if must_ask:
            self._asking = True  # the previous answer does not matter, and reading it would wait for the device
        elif self._asked is not None:
            # The answer is there: the question is from the previous pass.
            self._asking = not self._asked.someone_used_all()
        self._asked = None
        if missing and not self._asking and not self._alone:
            self._counter = f"unused/{self._session}/{self._passes}"
            self._job.transport.tally(self._counter, 1)

    def used_by_no_voter(self, used_here: Mapping[str, bool]) -> set[str]:
        """After a vote: names of the parameters that got no gradient on any rank. Without votes: none."""
        recovery = self._job.recovery
        if recovery is None:
            return set()
        return {name for name, anyone in zip(used_here, recovery.raised, strict=True) if not anyone}

    def used_by_nobody(self, used_here: Mapping[str, bool], exchanges: Sequence[Task], *, missing: bool) -> set[str]:
        """Names of the parameters that got no gradient on any rank; `exchanges` are those of this pass.

        Where a vote follows, no rank is asked before, and no name is returned.
        """
        if self._job.recovery is not None:
            return set()
        if self._alone:
            return {name for name, used in used_here.items() if not used}
        if not self._asking:
            if not missing or not self._all_miss_something(exchanges):
                return set()
            self._asking = True
        self._asked = _Question(self._job, used_here, used_all=not missing)
        if not missing:
            return set()
        nobody = self._asked.used_by_nobody()
        if nobody:
            self._finish(exchanges)
        return nobody

    def _all_miss_something(self, exchanges: Sequence[Task]) -> bool:
        self._finish(exchanges)
        transport = self._job.transport
        everyone = transport.tally(self._counter, 0) == transport.world_size
        # The others have contributed to this pass, so they are done with the previous one.
        if self._last_counter:
            transport.drop_tally(self._last_counter)
        self._last_counter = self._counter
        return everyone

    def _finish(self, exchanges: Sequence[Task]) -> None:
        for task in exchanges:
            self._job.engine.wait(task)
            if task.outputs_ready is not None:  # on a GPU only the stream has waited
                task.outputs_ready.synchronize()


class _Question:
    """One exchange of the parameters that each rank used."""

    def __init__(self, job: Job, used_here: Mapping[str, bool], *, used_all: bool) -> None:
        self._engine = job.engine
        self._names = list(used_here)
        self._flags: list[torch.Tensor] = []
        transport, device = job.transport, job.transport.control_device
        said = [*used_here.values(), used_all]

        def start() -> Exchange:
            # Made here, on the communication thread's own stream: a rank that used everything does not wait for the
            # answer, and memory of the training stream could be given to something else meanwhile.
            flags = torch.tensor(said, dtype=torch.uint8).to(device)
            self._flags.append(flags)
            return one_round(transport.all_reduce(flags, op="max", purpose="control", what=_WHAT))

        self._task = job.engine.submit(Task(_WHAT, start, step=job.step, device=device, over_group=True))

    def _answer(self) -> list[int]:
        self._engine.wait(self._task)
        return self._flags[0].tolist()

    def used_by_nobody(self) -> set[str]:
        """Names that no rank has used."""
        return {name for name, anyone in zip(self._names, self._answer()[:-1], strict=True) if not anyone}

    def someone_used_all(self) -> bool:
        """Whether some rank has used every parameter."""
        return bool(self._answer()[-1])
