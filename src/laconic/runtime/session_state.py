"""The state of a strategy at work: packed for a checkpoint, read from one, and loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from laconic.core.stateful import CARRIED, ParameterState, Resize
from laconic.errors import CheckpointError
from laconic.runtime.change import AtWork
from laconic.runtime.checkpoint import Report, compare, pack, read
from laconic.runtime.digest import digests
from laconic.runtime.hooks.rounds import PENDING
from laconic.runtime.job import Job
from laconic.runtime.other_shards import check_other_shards, refuse_load, whole_digests
from laconic.runtime.pairwise_messages import PER_EDGE
from laconic.runtime.progress import Progress
from laconic.runtime.shards import as_attached, as_saved, is_sharded


class SessionState:
    """The state of one rank's session."""

    def __init__(self, job: Job, at_work: AtWork, progress: Progress | None) -> None:
        """progress: the position in the data, if session.batches() may be used."""
        self._job = job
        self._progress = progress
        self._strategy = job.strategy
        self._hooks = at_work.hooks
        self._pool = at_work.pool

    def packed(self) -> dict[str, Any]:
        """A copy of it, when no exchange is in flight."""
        with self._hooks.at_rest() if self._hooks is not None else nullcontext():
            state = self._hooks.state() if self._hooks is not None else {}
            if self._pool is not None:
                for name, fields in self._pool.state().items():
                    state.setdefault(name, {}).update(fields)
            copied = {name: self._copied(fields) for name, fields in state.items()}
            digest = self.digest()
        job, strategy = self._job, self._strategy
        specs, rank = job.specs(), job.transport.rank
        if not strategy.architecture.holds_shards:  # else each rank keeps state of whole gradients
            per_element = lambda name: {PENDING, CARRIED, *strategy.per_element(specs[name])}  # noqa: E731
            copied = as_saved(copied, job.parameters, per_element)
        order, resize = self._hooks.order() if self._hooks is not None else [], self._resize()
        if any(CARRIED in fields for fields in copied.values()):
            resize[CARRIED] = "sum"
        return pack(
            str(strategy),
            job.transport.world_size,
            job.step,
            order,
            resize,
            rank=rank,
            state=copied,
            digest={str(rank): digest},
            same_step=strategy.synchronization.barrier,
            loss_scaled=job.loss_scale.unit != 1.0,
            position=(0, 0) if self._progress is None else self._progress.position,
        )

    def read(self, saved: Mapping[str, Any], digest: torch.Tensor) -> Report:
        """Read a saved state and report its problems; digest: of the model as it is now."""
        job, strategy = self._job, self._strategy
        report = read(
            saved,
            lambda state: as_attached(state, job.parameters),
            str(strategy),
            list(job.parameters),
            world_size=job.transport.world_size,
            rank=job.transport.rank,
            expected=self._expected(),
            # The servers know the fields of their own state.
            kinds=None if self._pool is not None else {*self._resize(), CARRIED},
            digest=digest,
            replicas_differ=not strategy.exchanges_gradients() or not strategy.synchronization.replicas_identical,
        )
        report.unfit = report.unfit or job.loss_scale.why_not_loaded(scaled=saved["loss_scaled"])
        report.unfit = report.unfit or self._lacks_momentum(report)
        return report

    def _lacks_momentum(self, report: Report) -> str:
        """Why a state of one worker, which has kept none, cannot be loaded; empty if it can."""
        rule = self._strategy.synchronization
        if self._hooks is None or rule.quantity != "momentum" or report.step < rule.warmup:
            return ""
        if any(rule.momentum_field in fields for fields in report.state.values()):
            return ""
        return (
            f"the checkpoint was written by one worker, on which {rule.name} is Adam as it is, and step {report.step} "
            f"is after the first {rule.warmup} steps, in which {rule.name} averages gradients. Start without loading "
            "the session state, or train on with one worker."
        )

    def load(self, report: Report, said: Sequence[Mapping[str, str]]) -> None:
        """Load what this rank has read, unless a rank has reported a problem; said: the summaries of all ranks."""
        job = self._job
        try:
            compare(said, report, rank=job.transport.rank, same_step=self._strategy.synchronization.barrier)
        except CheckpointError:
            refuse_load(job.parameters)
            raise
        check_other_shards(job.parameters, report.step, timeout_s=job.transport.timeout_s)
        job.loss_scale.loaded()
        if self._hooks is not None:
            self._hooks.load(report.state, report.order, report.step)
        if self._pool is not None:
            self._pool.load(report.state)
        if self._progress is not None:
            self._progress.load(report.position)
        job.step = report.step

    def _copied(self, fields: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A copy of the state of one parameter, in the unit of gradients without a GradScaler's scale."""
        unit, scaled = self._job.loss_scale.unit, self._strategy.scaled_fields() | {CARRIED}
        return {
            key: value / unit if unit != 1.0 and key.partition("|")[0] in scaled else value.clone()
            for key, value in fields.items()
        }

    def _resize(self) -> dict[str, Resize]:
        """How each field of saved state is converted when the number of workers changes."""
        # A mean over all ranks is the same for all of them.
        in_common = self._strategy.architecture.scope == "everyone"
        resize: dict[str, Resize] = {**self._strategy.resize(), PENDING: "copy" if in_common else "reset"}
        if self._strategy.architecture.compensates:
            for field in PER_EDGE:
                resize[field] = "reset"
        if self._hooks is None:
            # One worker that communicates with nobody keeps no state: with others, it starts anew.
            return dict.fromkeys(resize, "reset")
        return resize

    def digest(self) -> torch.Tensor:
        """One checksum per parameter; of whole parameters, if the model is sharded. Every rank calls it then."""
        job = self._job
        if any(map(is_sharded, job.parameters.values())):
            return torch.tensor(whole_digests(job.parameters, timeout_s=job.transport.timeout_s), dtype=torch.int64)
        return torch.tensor(digests(job.parameters.values()), dtype=torch.int64)

    def _expected(self) -> ParameterState:
        """The current state without fields that a saved one may lack: of an earlier strategy, or in flight."""
        state = self._hooks.state() if self._hooks is not None else {}
        return {
            name: {field: value for field, value in fields.items() if field not in (CARRIED, PENDING)}
            for name, fields in state.items()
        }
