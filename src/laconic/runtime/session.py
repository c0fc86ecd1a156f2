"""A strategy at work on one model: what attach() returns."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils.data import DataLoader

from laconic.core.event import DiscardEvents, Event, Scalar
from laconic.core.plan import Plan
from laconic.core.transport import DETACHING, Traffic, Transport
from laconic.errors import (
    AttachError,
    CheckpointError,
    CommunicationError,
    LaconicError,
    PeerLost,
    StrategyError,
    UnsupportedGradient,
    one_line,
)
from laconic.runtime.agreement import agree, agree_on
from laconic.runtime.change import AtWork, Workplace, change, check_change
from laconic.runtime.checkpoint import Report
from laconic.runtime.consensus import average, consensus_distance
from laconic.runtime.distributed_checkpoint import read_checkpoint
from laconic.runtime.elastic.batches import Batches, Division, FixedDivision
from laconic.runtime.elastic.recovery import ElasticRecovery
from laconic.runtime.elastic.settings import Elastic
from laconic.runtime.elastic.view_history import ViewChange
from laconic.runtime.hooks.contract import TrainingHooks
from laconic.runtime.hooks.module_buffers import ModuleBuffers
from laconic.runtime.job import Job
from laconic.runtime.join import join
from laconic.runtime.progress import Progress
from laconic.runtime.reenterable import Reenterable
from laconic.runtime.servers.server_pool import ServerPool
from laconic.runtime.session_state import SessionState
from laconic.runtime.shards import reshard
from laconic.strategy import Strategy, as_strategy

_AT_EXIT_S = 10.0
"""How long a script that has ended without detaching serves ranks that still need it."""


class Session:
    """A strategy attached to a model and an optimizer.

    Use it as a context manager, or call detach() yourself. Every rank attaches and detaches.
    """

    def __init__(
        self,
        job: Job,
        at_work: AtWork,
        workplace: Workplace,
        cleanup: ExitStack,
        *,
        recovery: ElasticRecovery | None = None,
        elastic: Elastic | None = None,
    ) -> None:
        self._job = job
        self._at_work = at_work
        self._workplace = workplace
        self._cleanup = cleanup
        self._recovery = recovery
        self._division: Division | None = recovery
        if recovery is None and elastic is not None:
            self._division = FixedDivision(elastic, self.rank, self.world_size)
        self._attached = True
        self._handled_before = sys.exception()

    @property
    def _hooks(self) -> TrainingHooks | None:
        return self._at_work.hooks

    @property
    def _buffers(self) -> ModuleBuffers | None:
        return self._at_work.buffers

    @property
    def _pool(self) -> ServerPool | None:
        return self._at_work.pool

    @property
    def strategy(self) -> Strategy:
        """The strategy at work: the one that was attached, or the last one it was changed to."""
        return self._job.strategy

    def change_strategy(self, strategy: Strategy | str, *, reason: str = "") -> None:
        """Change to another strategy from the next step on; every rank calls it, after optimizer.step().

        Each of the two strategies must average gradients in every step, or exchange changes of parameters after some
        steps (local_sgd, the DiLoCo family), over all ranks and without servers. Nothing that was still to be sent is
        lost: gradients are added to the next ones, and replicas that have trained alone become the mean of all, minus
        the changes that were still to be sent, with the optimizer's state of rank 0 if gradients are averaged next. The
        counts of steps, bytes and events continue; hooks, buckets and all other state of the old strategy start anew.

        reason: for the event log.

        A strategy that cannot take over is refused, and the current one stays. If the change fails half-way, the
        session is detached.
        """
        job, chosen, began_s = self._job, as_strategy(strategy), self._job.clock.now()
        said = self._agree("change_strategy()", {"strategy": str(chosen)})
        for rank, row in enumerate(said):
            if row["strategy"] != said[0]["strategy"]:
                raise CommunicationError(
                    f'ranks change to different strategies: "{said[0]["strategy"]}" on rank 0 and "{row["strategy"]}" '
                    f"on rank {rank}. Give the same strategy on every rank."
                )
        check_change(job, self._at_work, chosen, self._workplace)
        before = str(self.strategy)
        try:
            self._at_work = change(job, self._at_work, self._workplace, chosen)
        except BaseException as error:
            self._release_after(error)
            raise
        data = {"strategy": str(self.strategy), "before": before, "reason": reason}
        job.events.write(Event("change", began_s, self.rank, self.step, job.clock.now() - began_s, {**data}))

    def why_not_changed_to(self, strategy: Strategy | str) -> str:
        """Why change_strategy() would refuse this strategy, in a sentence; empty if it would not."""
        try:
            check_change(self._job, self._at_work, as_strategy(strategy), self._workplace)
        except (AttachError, StrategyError, UnsupportedGradient) as error:
            return str(error)
        return ""

    def call_after_step(self, action: Callable[[Job], None]) -> None:
        """Call `action` after every step of all optimizers, when laconic has finished its own work for the step."""
        self._job.after_step.append(action)

    @property
    def rank(self) -> int:
        """The number of this rank in the group."""
        return self._job.transport.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that train together."""
        return self._job.transport.world_size

    @property
    def views(self) -> list[ViewChange]:
        """The views so far: which ranks trained together, from which step on; empty without elastic."""
        return [] if self._recovery is None else list(self._recovery.views)

    def batches(self, loader: DataLoader[Any], *, epochs: int = 1, seed: int = 0) -> Iterable[Any]:
        """This rank's batches of `epochs` epochs, with elastic: whatever ranks die or join, no sample is used twice.

            for inputs, targets in session.batches(DataLoader(data, batch_size=96, shuffle=True), epochs=10):

        The loader is the same on every rank. Its batch size is that of all ranks together, unless elastic has
        batch="local". Losses are means over the batch: gradients are weighted by the number of samples of each rank. If
        a rank dies, its contribution to that step is missing. A rank that joins starts at the position of the others.

        epochs: counted from the beginning of training; for a loop over epochs, see `epoch`. seed: determines the order
        of samples with shuffle=True.
        """
        if self._division is None:
            raise AttachError(
                "session.batches() divides samples among ranks that may change: attach with "
                "elastic=laconic.Elastic(...). Otherwise use a DataLoader with DistributedSampler."
            )
        if self.strategy.synchronization.deadline_s is not None:
            raise AttachError(
                f'session.batches() divides the samples of steps that all ranks make, and under "{self.strategy}" each '
                "makes as many as it can. Let every rank draw samples of its own, and train while session.step < total."
            )
        batches = Batches(self._job, self._division, loader, epochs=epochs, seed=seed)
        if self._job.recovery is None:
            agree_on(self._job, "session.batches()", batches.about())
        return batches

    @property
    def epoch(self) -> int:
        """The epoch that session.batches() is in, on all ranks: 0 where training begins.

            for epoch in range(session.epoch, 10):
                for inputs, targets in session.batches(loader, epochs=epoch + 1):
                    ...
                scheduler.step()

        A rank that joins in epoch 5 would otherwise repeat what the loop does after each of the epochs before.
        """
        if self._division is None:
            raise AttachError(
                "session.epoch is that of session.batches(), which needs laconic.attach(..., "
                "elastic=laconic.Elastic(...)). Count epochs in the loop."
            )
        return self._division.progress.position[0]

    @property
    def step(self) -> int:
        """Optimizer steps completed, including those before a checkpoint that was loaded. Where rounds end by time, the
        steps that were left out count, so that it is the same on all ranks after every round.
        """
        return self._job.step

    @property
    def traffic(self) -> Traffic:
        """Bytes this rank has sent, as counted by the transport."""
        return self._job.transport.traffic

    @property
    def plan(self) -> Plan:
        """Buckets and their order from the next backward pass on."""
        return self._hooks.plan() if self._hooks is not None else Plan(())

    def predicted_bytes_per_step(self) -> int:
        """Payload bytes this rank should send per step, from formulas alone."""
        return self.strategy.plan_bytes_per_step(self.plan, self._job.moment())

    def consensus_distance(self) -> float:
        """The distance of replicas from their mean, relative to its norm; 0 if all are equal. Every rank calls it.

            sqrt(mean_i |x_i - m|^2) / |m|,   m = mean_i(x_i)

        Costs one all-reduce of all parameters, counted as control traffic. For a sharded model it covers this rank's
        shards.
        """
        self._agree("consensus_distance()")
        return self._job.together("the distance of replicas", lambda: consensus_distance(self._job), ())

    def average(self) -> None:
        """Replace every replica by the mean of all: the final model of local updates and gossip. Every rank calls it.

        Exchanges in flight are applied first. Floating-point buffers are averaged too; others become rank 0's.
        """
        if self._hooks is not None:
            self._agree("average()")
            self._hooks.settle()
        reshard(self._job.model)  # parameters that an evaluation left unsharded would keep old values
        if self._recovery is None:
            average(self._job)
        else:
            self._recovery.average()
        if self._hooks is not None:
            self._hooks.adopt()

    def _agree(self, operation: str, about: Mapping[str, str] | None = None) -> list[dict[str, str]]:
        """Return when every rank has called this operation; raise if one cannot."""
        self._job.engine.check()
        if self._recovery is not None:
            # With elastic no rank waits outside the units of training.
            self._recovery.rest()
            return [{"operation": operation, **(about or {})}]
        if self._hooks is not None:
            self._hooks.stop_holding_up()
        return agree(self._job, operation, about)

    def join(self, *, divide_by_initial_world_size: bool = True) -> AbstractContextManager[None]:
        """Let ranks run out of data: a rank without data contributes zeros until all ranks are done.

            with session.join():
                for batch in data:
                    ...

        Like torch's Join for DDP, but for bsp and local updates over all_reduce. Every rank enters the block. At its
        end, under a strategy that keeps replicas equal, all take the model and optimizer state of the rank that trained
        last; replicas of local updates stay as they are: call average() for one model. A rank that has run out waits at
        most timeout_s for the next exchange of the others.

        divide_by_initial_world_size: means are over all ranks; False: over those that still have data.
        """
        if self._job.chosen_by:
            raise AttachError(
                f'session.join() does not work with "{self._job.chosen_by}": ranks without data could not take part in '
                f"its decisions. Attach with a fixed strategy, such as the one at work now: {self.strategy}"
            )
        return join(self._job, self._hooks, self._buffers, divide_by_initial_world_size=divide_by_initial_world_size)

    def wait(self) -> None:
        """Return when no exchange of this rank is in flight; arrived results are applied when they are due."""
        if self._hooks is not None:
            self._hooks.wait()

    @property
    def staleness(self) -> int:
        """The largest number of updates by others that a server applied before one of this rank (without a barrier)."""
        return self._job.staleness

    @property
    def slots(self) -> int:
        """Slots in which an aggregator adds up this job's frames (in_network); 0: no slots, or no aggregator."""
        client = None if self._pool is None else self._pool.client
        return 0 if client is None else client.num_slots

    @property
    def lost_ratio(self) -> float:
        """The share of the frames sent to this rank that are missing from its means (bounded_loss); 0 elsewhere."""
        datagrams = self._at_work.datagrams
        return 0.0 if datagrams is None else datagrams.lost_ratio

    @property
    def lead(self) -> int:
        """The largest number of steps by which this rank led the slowest when it got its answer (without a barrier)."""
        return self._job.lead

    @property
    def dropped(self) -> int:
        """The number of this rank's gradients that a server has dropped because they arrived too late (backup)."""
        return self._job.dropped

    def report_loss(self, loss: torch.Tensor | float) -> None:
        """Report the loss of this rank's batch; call this in every step, before optimizer.step().

            loss = criterion(model(inputs), targets)
            loss.backward()
            session.report_loss(loss)
            optimizer.step()

        Strategies that decide by the loss (adacomm) need it, and raise without it. With other strategies the loss only
        goes to the event log. The host does not wait for a tensor, unless events are recorded.
        """
        if isinstance(loss, torch.Tensor) and loss.numel() != 1:
            raise CommunicationError(
                f"session.report_loss() takes one number, got a tensor of shape {tuple(loss.shape)}. Report the mean "
                "over the batch."
            )
        job, value = self._job, loss.detach().reshape(()) if isinstance(loss, torch.Tensor) else loss
        job.losses.add(value)
        if not isinstance(job.events, DiscardEvents):
            data: dict[str, Scalar] = {"loss": float(value)}
            job.events.write(Event("loss", job.clock.now(), self.rank, self.step, 0.0, data))

    def accumulate(self, enabled: bool = True) -> AbstractContextManager[None]:
        """Backward passes inside add up gradients locally; the first one outside exchanges the sum:

            for index, batch in enumerate(batches):
                with session.accumulate(index + 1 < len(batches)):
                    loss(model(batch)).backward()
            optimizer.step()

        As in DDP, put the forward pass inside as well. The returned object may be entered any number of times.

        enabled: False exchanges as if there were no block.
        """
        return Reenterable(self._hooks.accumulating if self._hooks is not None and enabled else nullcontext)

    def state_dict(self) -> dict[str, Any]:
        """The state of the strategy on this rank; model and optimizer have their own.

        Every rank calls it, and saves the model after this call: exchanges in flight may still change parameters, and
        without a barrier (ssp, asp) parameters become those of the servers; under async_diloco, those of the servers
        with the change that this rank has not sent yet.
        """
        self._agree("state_dict()")
        return SessionState(self._job, self._at_work, self._progress).packed()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state of state_dict() on this rank; load model and optimizer first.

        Every rank calls it. If one of them cannot load its state, all raise and nothing has changed.

        With "auto", a state of another strategy is handed over to the first one, as change_strategy() does it.
        """
        self._job.engine.check()
        self._load(state_dict)

    def load_checkpoint(self, folder: str | os.PathLike[str], *, key: str = "session") -> None:
        """Continue from what torch.distributed.checkpoint has saved; load model and optimizer first.

            torch.distributed.checkpoint.save({"session": session.state_dict(), ...}, checkpoint_id=folder)

            session.load_checkpoint(folder)  # later, in a new session

        The number of replicas and of shards may differ from the saved one: residuals are added up as in
        laconic.redistribute(). With the same number, an exchange that was in flight continues. Every rank calls it; if
        one of them cannot load its state, all raise.

        key: the key of the session state in the saved dictionary.
        """
        self._job.engine.check()
        # Under `sharded`, each rank keeps state of whole gradients.
        parameters = {} if self.strategy.architecture.holds_shards else self._job.parameters
        try:
            saved = read_checkpoint(folder, key, parameters, rank=self.rank, world_size=self.world_size)
        except CheckpointError as error:
            self._load(None, unfit=str(error))
        else:
            self._load(saved)

    def _load(self, saved: Mapping[str, Any] | None, *, unfit: str = "") -> None:
        """Load the state if every rank can load what it has read; unfit: why this rank cannot."""
        if self._recovery is not None:
            self._recovery.loads.refuse()
        first = self._taking_over(saved)
        try:
            self._load_into_strategy(saved, unfit)
        except CheckpointError:
            if first is not None:
                self.change_strategy(first, reason="the state of a checkpoint was not loaded")
            raise
        if first is not None:
            self.change_strategy(first, reason="the state of a checkpoint was loaded")

    def _taking_over(self, saved: Mapping[str, Any] | None) -> Strategy | None:
        """With auto, change to the strategy that a state was saved under; returns the one to go on with."""
        job = self._job
        if not job.chosen_by or job.step > 0:
            return None
        strategy = saved.get("strategy") if isinstance(saved, Mapping) else None
        said = [row["saved_under"] for row in self._agree("load_state_dict()", {"saved_under": str(strategy)})]
        first = self.strategy
        if len(set(said)) > 1 or said[0] == str(first):
            return None
        try:
            refused = self.why_not_changed_to(said[0])
        except LaconicError:
            return None  # not the text of a strategy, which loading reports
        if refused:
            return None
        self.change_strategy(said[0], reason="to load the state of a checkpoint")
        return first

    def _load_into_strategy(self, saved: Mapping[str, Any] | None, unfit: str) -> None:
        state = SessionState(self._job, self._at_work, self._progress)
        digest = state.digest()  # also on a rank that cannot load: the ranks with other shards wait for its part
        report = Report(unfit=unfit) if saved is None else state.read(saved, digest)
        state.load(report, self._agree("load_state_dict()", report.summary()))

    @property
    def _progress(self) -> Progress | None:
        return None if self._division is None else self._division.progress

    def settle(self) -> None:
        """Return when every optimizer.step() so far has been applied to all parameters.

        Under priority and dear, updates are deferred to the next forward pass. Call this before reading or writing
        parameters between step() and the next forward pass: clamping, weight averaging, copying the model. With other
        schedules it returns at once.
        """
        if self._hooks is not None:
            self._hooks.finish_updates()

    def call_on_detach(self, action: Callable[[], object]) -> None:
        """Call `action` when this session is detached, also after an error."""
        self._cleanup.callback(action)

    def detach(self) -> None:
        """Remove every hook; model, optimizer and their state are as if laconic had never been there.

        Where replicas are equal after every step, module buffers are made equal one last time. Elsewhere each rank
        keeps its own; call average() first for one model. Detaching twice is fine.

        After an error that the training loop has seen, or while one is being handled, it waits for nothing and raises
        nothing: in `finally` it never hides the first error.
        """
        if not self._attached:
            return
        handled = sys.exception()
        # An error that was being handled when the session began is unrelated; StopIteration ends a loop.
        unrelated = handled is self._handled_before or isinstance(handled, StopIteration)
        if handled is not None and not unrelated and not self._ends_in_order(handled):
            self._release_after(handled)
        elif self._job.engine.failure_was_raised:
            self._release()
        else:
            self._leave()

    def _leave(self, *, at_exit: bool = False) -> None:
        try:
            self._finish(at_exit=at_exit)
        except BaseException as error:
            self._release_after(error)
            raise
        self._release()

    def _finish(self, *, at_exit: bool) -> None:
        """Finish the last step together with the other ranks.

        at_exit: they may be doing something else, such as an evaluation, or this one may have failed.
        """
        self._job.transport.set_status(DETACHING)  # tells a rank that waits for this one elsewhere
        if self._recovery is not None:
            self._recovery.rest()
            self._job.stopwatch.flush()
            self._recovery.close(finished=True)
            return
        if self._hooks is not None:
            self._hooks.finish_updates()
            self._hooks.wait()
        if not at_exit:
            self._job.compare_steps(last=True)
            if self._buffers is not None:
                self._buffers.synchronize()
        self._job.stopwatch.flush()
        at_most_s = _AT_EXIT_S if at_exit else math.inf
        if self._hooks is not None:
            self._hooks.leave(at_most_s)
        if self._pool is not None:
            self._pool.leave(at_most_s)
        if self._at_work.datagrams is not None:
            self._at_work.datagrams.leave(at_most_s)

    def _release(self) -> None:
        self._attached = False
        self._cleanup.close()

    def _release_after(self, error: BaseException) -> None:
        """Undo everything without waiting for other ranks, and announce to them why this rank ends."""
        self._attached = False
        if not self._job.engine.failed():
            announce(self._job.transport, error)
        close_after(error, self._cleanup)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self._ends_in_order(error):
            self.detach()
        elif self._attached:
            self._release_after(error)

    def end_with_process(self) -> None:
        """The script ends without having detached: complete what others wait for, or tell them why this rank fails.

        An error that was caught, so that the script ended by sys.exit(1), is not known here. Threads that communicate
        must have ended before the interpreter does: it would abort the process otherwise.
        """
        transport = self._job.transport
        unable = transport.in_process or not transport.is_open or self._job.engine.failed()
        error = getattr(sys, "last_value", None)  # what ended the script, if nothing handled it
        if isinstance(error, BaseException):
            self.__exit__(type(error), error, error.__traceback__)
        elif self._recovery is None and unable:
            self._release()
        else:
            self._leave(at_exit=True)

    def _ends_in_order(self, error: BaseException) -> bool:
        """Whether this is sys.exit(0) in an elastic job, whose other ranks continue or end by themselves."""
        elastic = self._recovery is not None and not self._recovery.is_closed
        return elastic and isinstance(error, SystemExit) and error.code in (None, 0)


def announce(transport: Transport, error: BaseException, *, while_doing: str = "") -> None:
    """Announce to the other ranks why this one ends; if the error names another rank, blame that one."""
    lost = error.rank if isinstance(error, PeerLost) else None
    if lost is None or lost == transport.rank:
        transport.announce_failure(what_was_raised(error, while_doing))
    else:
        transport.announce_failure(f"was lost, says rank {transport.rank}: {one_line(error)}", rank=lost)


def what_was_raised(error: BaseException, while_doing: str) -> str:
    """An error in the words that other ranks read after "rank 1"."""
    said = one_line(error).removesuffix(".")
    why = f": {said}" if said else ""  # KeyboardInterrupt has no text
    return f"raised {type(error).__name__}{while_doing}{why}"


def close_after(error: BaseException, cleanup: ExitStack) -> None:
    """Undo everything; an error in doing so is added as a note to the first error and never replaces it."""
    try:
        cleanup.close()
    except Exception as problem:  # noqa: BLE001 - the first error is the one to raise
        error.add_note(f"laconic: while detaching, {type(problem).__name__}: {one_line(problem)}")
