"""Continues training in the next view: joint work is done in units, which can be undone and repeated.

A unit (the gradients of a step, a round of local updates) ends with a vote: a rank sends its ballot to all others when
everything of the unit has arrived there. A rank that has all ballots knows that all ranks have prepared the unit, and
applies it. If the view breaks before, every survivor asks the keeper for the next view and
reports its progress. The unit is done if all survivors have prepared it (membership/decisions.py). Otherwise all of
them restore gradients and their state, bit for bit, and repeat the exchange in the new view. The training loop waits
inside backward() or step() meanwhile.

If the model is sharded, exchanges are between ranks that hold the same shards, one of each replica, and the vote is one
of all ranks. The ranks of a replica leave each of these operations together (elastic/replica.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from laconic.core.event import Event
from laconic.core.stateful import BucketState
from laconic.errors import AttachError
from laconic.membership.member import Member
from laconic.membership.transport import ViewTransport
from laconic.membership.view import Ask, View, ViewBroken
from laconic.runtime.collective_costs import settle
from laconic.runtime.consensus import average
from laconic.runtime.elastic.connections import Connections
from laconic.runtime.elastic.division import Reader, Speeds
from laconic.runtime.elastic.handover import HandOver
from laconic.runtime.elastic.open_exchanges import OpenExchanges
from laconic.runtime.elastic.refused_loads import RefusedLoads
from laconic.runtime.elastic.replica import ReplicaRanks
from laconic.runtime.elastic.settings import Carried, Elastic
from laconic.runtime.elastic.sigterm import Sigterm
from laconic.runtime.elastic.state_transfer import Facts, share_state
from laconic.runtime.elastic.step_boundary import StepBoundary
from laconic.runtime.elastic.view_history import ViewChange, tell_view
from laconic.runtime.elastic.vote import WHAT, Ballot, Vote, of_text, to_text
from laconic.runtime.engine import Engine, Task
from laconic.runtime.hooks.contract import TrainingHooks
from laconic.runtime.hooks.module_buffers import ModuleBuffers
from laconic.runtime.job import Job
from laconic.runtime.progress import Progress
from laconic.runtime.shards import local, reshard
from laconic.strategy import Strategy

_T = TypeVar("_T")


class ElasticRecovery:
    """The set of ranks of one session, which may change. See Recovery in runtime/job.py."""

    def __init__(
        self,
        member: Member,
        elastic: Elastic,
        strategy: Strategy,
        carried: Sequence[Carried],
        *,
        cuda: bool,
        knows_scaler: bool,
        replica: ReplicaRanks,
        reader: Reader,
    ) -> None:
        """Returns when this worker is a member of a view.

        carried: objects whose state ranks that join take over. knows_scaler: the loop's GradScaler is one of them.
        replica: the ranks of this rank's replica. reader: the samples of a replica that this rank uses.
        """
        self.member = member
        self.reader = reader
        self._replica = replica
        self._carried = carried
        self._knows_scaler = knows_scaler
        self.elastic = elastic
        self.views: list[ViewChange] = []
        self.unit = 0
        """The number of units that are done."""
        self.progress = Progress()
        self.weights: dict[str, int] | None = None
        """The number of samples of each replica in the current unit; None: all have the same number."""
        self.raised: tuple[bool, ...] = ()
        self._flags: tuple[bool, ...] = ()
        self._strategy = strategy
        self._cuda = cuda
        self._connections = Connections(member, cuda=cuda)
        self._fresh = True
        self._prepared = False
        self._boundary = StepBoundary(self._change_view)
        self._leaving = Sigterm()
        self.loads = RefusedLoads()
        self._open = OpenExchanges(self.share)
        self._job: Job | None = None
        self._hooks: TrainingHooks | None = None
        self._buffers: ModuleBuffers | None = None
        self._closed = False
        most = elastic.max_ranks if elastic.max_ranks is not None else 2**31
        self.view = member.ready(min_ranks=elastic.min_ranks, max_ranks=most)
        self._speeds = Speeds(unit=reader.count)
        self.split = self._speeds.split(self.view.replicas)
        """How the samples of the next step are divided."""
        self._connect_first()

    @property
    def transport(self) -> ViewTransport:
        """The ranks with which this one exchanges in the current view."""
        return self._connections.exchanges

    @property
    def name(self) -> str:
        """The name of this worker's replica, the same in all views."""
        return self.view.seat_of(self.member.name).replica

    # -- becoming a member -----------------------------------------------------------------------------------------

    def _connect_first(self) -> None:
        """Connect to the members of the view, or of a later one if that is over before."""
        while True:
            problem = None
            try:
                self._connections.connect(self.view)
            except ViewBroken as broken:
                problem = broken
            problem = self._common(problem)
            if problem is None:
                return
            self._close_transport()
            self.view = self._admitted_again(problem)

    def _admitted_again(self, broken: ViewBroken) -> View:
        """Join the next view as a worker without any state of training."""
        return self.member.next_view(
            Ask(worker=self.member.name, view=self.view.number, fresh=True, turn=self.member.turn, why=str(broken))
        )

    def begin(self, job: Job, hooks: TrainingHooks, buffers: ModuleBuffers | None) -> None:
        """Receive the state of training, or send it to the others."""
        self._job, self._hooks, self._buffers = job, hooks, buffers
        while self._fresh:
            problem = None
            try:
                self._share_state(self.unit)
            except ViewBroken as broken:
                problem = broken
            problem = self._common(problem)
            if problem is None:
                self._fresh = False
            else:
                self._close_transport()
                self.view = self._admitted_again(problem)
                self._connect_first()
                self._move_job()
        self._leaving.listen()
        self._boundary.watch(job.model)
        if self.unit:
            self.loads.begin(job)
        self._note_view(0.0, redone=False)

    def _share_state(self, units: int) -> None:
        """Fresh members receive the state of the source, after so many units; the other members continue."""
        job, transport = self._the_job, self._connections.for_state(self.view)
        if transport is None:
            return
        reshard(job.model)  # an evaluation since the last step leaves parameters of FSDP's outermost module whole
        try:
            facts = Facts(units, job.step, self.progress.position, self._speeds.used, job.loss_scale.unit)
            facts = share_state(transport, job, self._the_hooks, facts, self._carried)
        finally:
            transport.close()
        if transport.rank > 0:
            self.unit, job.step, self.progress.position, self._speeds.used, loss_scale = facts
            job.loss_scale.adopt(loss_scale)
        self.split = self._speeds.split(self.view.replicas)

    @property
    def _the_job(self) -> Job:
        assert self._job is not None, "begin() comes first"
        return self._job

    @property
    def _the_hooks(self) -> TrainingHooks:
        assert self._hooks is not None, "begin() comes first"
        return self._hooks

    # -- exchanges that can be undone --------------------------------------------------------------------------------

    def guard(self, task: Task, again: Callable[[], Task], flat: torch.Tensor, state: BucketState) -> None:
        self._boundary.exchange_begins()
        self._open.add(task, again, flat, state)

    def handed_out(self) -> None:
        """This rank is about to work on a batch of session.batches()."""
        self._boundary.batch_handed_out()
        self._speeds.handed_out(self._the_job.clock.now())

    def share(self) -> float:
        """This replica's weight in a mean over those of the current view: by samples or steps, if they are known."""
        replicas, rule = self.view.replicas, self._the_job.strategy.synchronization
        # Local updates of a fixed number of steps count alike, however the samples of each step were divided.
        if self.weights is None or (rule.quantity == "change" and rule.deadline_s is None):
            return 1.0 / len(replicas)
        return self.weights[self.name] / sum(self.weights.get(name, 0) for name in replicas)

    def weigh(self, count: int, what: str) -> None:
        """Exchange counts in a unit of their own: if a member dies in the next mean, the others know all counts."""
        job = self._the_job
        gathered = lambda: dict(zip(self.view.replicas, job.gather_counts(count, what), strict=True))  # noqa: E731
        self.weights = weights = self.together(what, gathered, ())
        data = {"members": ",".join(weights), "counts": ",".join(map(str, weights.values()))}
        job.events.write(Event("weights", job.clock.now(), self.transport.rank, job.step, 0.0, {**data}))

    # -- units -------------------------------------------------------------------------------------------------------

    def together(self, what: str, attempt: Callable[[], _T], tasks: Sequence[Task], flags: Sequence[bool] = ()) -> _T:
        while True:
            outcome = self._once(what, attempt, tasks, flags)
            if outcome is not None:
                return outcome[0]

    def _once(
        self, what: str, attempt: Callable[[], _T], tasks: Sequence[Task], flags: Sequence[bool] = ()
    ) -> tuple[_T] | None:
        """Make one attempt at a unit; None: it is not done, and this rank is in another view."""
        outcome: tuple[_T] | None = None
        job = self._the_job
        # Always as many: ranks that do different things must find that out by the vote, not by its size.
        self._flags = tuple(flags) or (False,) * len(job.parameters)
        if self.weights is not None:
            if self._cuda and self.elastic.balance:
                torch.cuda.current_stream().synchronize()  # backward() returns before the device has finished
            self._speeds.came(job.clock.now(), self.reader.share(self.weights[self.name]))
        made_in, done = self.view, False
        problem, heard, wants_change = None, dict[str, int](), False
        try:
            # All that follows then is to wait: the ballot leaves when the exchanges before it are done.
            early = self._vote(what, tasks) if self._is_prepared_by(tasks) else None
            outcome = (attempt(),)
            self._arrived(tasks)
            heard, wants_change = self._heard(early or self._vote(what, tasks))
            done = True
        except ViewBroken as broken:
            problem = broken
        problem = self._common(problem)
        if problem is None:
            self._boundary.wanted |= wants_change
            self._speeds.unit_done(self.unit, heard)
            self.split = self._speeds.split(self.view.replicas)
        elif not self._recover(problem, tasks, done=done):
            return None
        self._open.count(tasks)
        self._unit_done(what, made_in)
        return outcome

    def _unit_done(self, what: str, made_in: View) -> None:
        job = self._the_job
        self._prepared = False
        data = {"unit": self.unit, "what": what, "view": made_in.number, "members": ",".join(made_in.members)}
        job.events.write(Event("unit", job.clock.now(), self.transport.rank, job.step, 0.0, {**data}))
        self.unit += 1
        self.weights = None
        self.loads.end()

    def _arrived(self, tasks: Sequence[Task]) -> None:
        """Return when the results are in memory, also on a GPU, and module buffers are rank 0's."""
        if self._buffers is not None and tasks:
            self._buffers.synchronize()
        for task in tasks:
            if task.outputs_ready is not None:
                task.outputs_ready.synchronize()
        # On a GPU an operation that was aborted seems to have ended well.
        self.transport.raise_if_over(WHAT)

    def _is_prepared_by(self, tasks: Sequence[Task]) -> bool:
        """Whether a unit is prepared once these tasks are done: nothing that might fail follows them."""
        return bool(tasks) and self._buffers is None and not self._cuda

    def _vote(self, what: str, tasks: Sequence[Task] = ()) -> Vote:
        """Send this rank's ballot when these tasks are done."""
        wants = bool(self._leaving) or self.member.wants_change(self.view.number)
        mine = Ballot(self.unit, wants, self._speeds.own if self.elastic.balance else 0, self.progress.data)

        def prepared() -> None:
            assert all(task.succeeded for task in tasks), f"{what}: the vote has overtaken an exchange"
            self._prepared = True  # before the ballot leaves: once the others have all ballots, the unit is done

        votes, members = self._connections.votes, self.view.members
        return Vote(self._the_job, votes, members, mine, flags=self._flags, what=what, prepared=prepared)

    def _heard(self, vote: Vote) -> tuple[dict[str, int], bool]:
        """Return when all members have prepared the unit: the replicas' speeds, and whether one wants another view."""
        said = vote.result()
        self.raised = said.raised
        # A replica is as fast as its slowest rank, which all others wait for.
        speeds: dict[str, int] = {}
        for name, ballot in said.ballots.items():
            replica = self.view.seat_of(name).replica
            speeds[replica] = min(speeds.get(replica, ballot.speed), ballot.speed)
        return speeds, any(ballot.wants_change for ballot in said.ballots.values())

    def rest(self) -> None:
        """Return when nothing is in flight on any rank; every rank calls it."""
        if self._open.tasks:
            self.together("what is in flight", self._the_hooks.wait, self._open.tasks)

    def average(self) -> None:
        """Replace all replicas by their mean; every rank calls it."""
        job = self._the_job
        tensors = [local(tensor) for tensor in (*job.model.parameters(), *job.model.buffers())]
        before = [tensor.detach().clone() for tensor in tensors]

        def attempt() -> None:
            with torch.no_grad():
                for tensor, value in zip(tensors, before, strict=True):
                    tensor.copy_(value)
            average(job)

        self.together("the mean of replicas", attempt, ())

    def _recover(self, broken: ViewBroken, tasks: Sequence[Task], *, done: bool) -> bool:
        """Continue in the next view; return whether the interrupted unit is done.

        done: it is done on this rank, and another rank of the replica does not know that.
        """
        job = self._the_job
        began_s, old, told = job.clock.now(), self.view, False
        self._boundary.forget()
        while True:
            problem = None
            try:
                self._close_transport()
                self.view = view = self.member.next_view(self._ask(done=done, boundary=False, why=str(broken)))
                if view.units > self.unit and not told:
                    self.raised = self.raised if done else of_text(view.flags, len(self._flags))
                    done = told = True
                    self._speeds.unit_done(self.unit, {})
                    # A member that is ahead has already divided the next samples, among the old members.
                    self.split = self._speeds.split(old.replicas if view.ahead else view.replicas)
                self._prepared = False
                self._connections.connect(view)
            except ViewBroken as again:
                problem = again
            problem = self._common(problem)
            if problem is None:
                break
            broken = problem
        self._speeds.view_changed()
        self._move_job()
        counted = tasks if done else ()
        self._open.restore(but=counted)
        self._start_anew()
        self._open.submit_again(job.engine, but=counted)
        self._note_view(job.clock.now() - began_s, redone=not done)
        return done

    def _common(self, problem: ViewBroken | None) -> ViewBroken | None:
        """Why the last attempt failed on a rank of this replica; None: on none of them."""
        if problem is not None and self._replica.are_several:
            # Others wait for this rank in the view, and one of them may be of this replica: they must not.
            self._close_transport()
            self.member.broken(self.view.number, str(problem))
        return self._replica.common(problem)

    def _ask(self, *, done: bool, boundary: bool, why: str) -> Ask:
        return Ask(
            worker=self.member.name,
            view=self.view.number,
            unit=self.unit + done,
            prepared=self._prepared and not done,
            inside=done,
            boundary=boundary,
            leaving=bool(self._leaving),
            flags=to_text(self.raised),
            own_flags=to_text(self._flags),
            why=why,
        )

    def _close_transport(self) -> None:
        """Stop all work of the current view; none of it writes to a tensor afterwards."""
        self.member.give_up(self.view.number, "left by this rank")
        if self._job is not None:
            self._job.engine.stop()
        self._connections.close()

    def stop_engine(self) -> None:
        """End the communication thread of the current view."""
        self._the_job.engine.stop()

    def _move_job(self) -> None:
        job = self._the_job
        job.engine.stop()
        job.transport = self.transport
        job.stopwatch.rank = self.transport.rank
        job.engine = Engine(self.transport, job.stopwatch, recoverable=(ViewBroken,))
        job.strategy = settle(self._strategy, self.transport, job.clock, next(iter(job.parameters.values())).device)

    def _start_anew(self) -> None:
        """Reset state that is valid for one set of ranks only, as its method declares."""
        strategy = self._the_job.strategy
        fields = {field for field, kind in strategy.resize().items() if kind == "reset"}
        for state in self._the_hooks.bucket_states():
            if fields & state.per_element():
                state.start_anew(fields, strategy.init(state.bucket))

    # -- between units -----------------------------------------------------------------------------------------------

    def step_made(self) -> None:
        """The next view, if one is wanted, begins when the loop begins its next step."""
        if self._the_job.loss_scale.in_use and not self._knows_scaler:
            raise AttachError(
                "the loop uses a GradScaler that attach was not given: a rank that joins would not know its scale. "
                "Pass it: attach(..., elastic=..., grad_scaler=scaler)."
            )
        self._boundary.step_made()

    def before_batch(self) -> None:
        """The loop asks for its next batch."""
        self._boundary.batch_wanted()

    def _change_view(self) -> None:
        """Change to another view here, where all members are at the same place, if one of them wants that."""
        while self._boundary.wanted:
            self._boundary.forget()
            before = self.view
            if self._open.tasks:
                self._once("what is in flight", self._the_hooks.wait, self._open.tasks)
                if self.view is not before:
                    return  # ranks that have heard less do not change here, and train on
                self._boundary.forget()
            view, _ = self._next_at_boundary(done=False, why="others want to join or to leave")
            following: View | None = view
            while following is not None and following.leaving and following.boundary:
                following = self._let_go(following.leaving)
            self._boundary.wanted = following is None  # the next view is without the members that have left

    def _next_at_boundary(self, *, done: bool, why: str) -> tuple[View, bool]:
        """Change to the next view between two units; return it, and whether the unit that was prepared is done.

        done: it is, on this rank.
        """
        job = self._the_job
        began_s = job.clock.now()
        while True:
            problem = None
            view = self.member.next_view(self._ask(done=done, boundary=True, why=why))
            done |= view.units > self.unit
            self._prepared = False
            self._speeds.view_changed()
            if view.boundary:  # before connecting: if that fails here, others may have divided the next samples so
                self.split = self._speeds.split(view.replicas)
            try:
                # Only now: a rank that still waits for the last vote has received everything.
                self._close_transport()
                self.view = view
                self._connections.connect(view)
                self._move_job()
                self._start_anew()
                self._share_state(self.unit + done)
            except ViewBroken as broken:
                problem = broken
            problem = self._common(problem)
            if problem is None:
                break
            self._close_transport()
            why = str(problem)
        self._note_view(job.clock.now() - began_s, redone=False)
        return view, done

    def _let_go(self, leaving: Sequence[str]) -> View | None:
        """Members that leave hand over their residuals, then end; returns the next view if this one broke meanwhile.

        The hand-over is not repeated in another view, where other members may leave or none: some ranks may not have
        connected to this one.
        """
        job, me, made_in, what = self._the_job, self.member.name, self.view, "what leaving ranks owe"
        hand_over = HandOver(self._the_hooks.bucket_states(), job.strategy.resize(), me, leaving)
        self._flags = (False,) * len(job.parameters)
        problem, done, following = None, False, None
        try:
            hand_over.exchange(job, made_in.with_shards_of(me))
            self._heard(self._vote(what))
            done = True
        except ViewBroken as broken:
            problem = broken
        problem = self._common(problem)
        if problem is not None:
            self._close_transport()  # others wait for this rank in the hand-over
            following, done = self._next_at_boundary(done=done, why=str(problem))
            if not done:
                return following
        self._unit_done(what, made_in)
        hand_over.apply()
        if me in leaving:
            self.close(finished=False)
            raise SystemExit(0)
        return following

    def _note_view(self, seconds: float, *, redone: bool) -> None:
        job = self._the_job
        before = self.views[-1].view.with_shards_of(self.member.name) if self.views else ()
        num_lost = len(set(before) & set(self.view.lost))
        self.views.append(ViewChange(self.view, self.transport.rank, job.step, seconds, redone))
        position = self.view.seat_of(self.member.name).position
        states = self._the_hooks.bucket_states()
        tell_view(job, self.views[-1], self.unit, states, position=position, num_lost=num_lost)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, *, finished: bool) -> None:
        """Leave the job, at the end of training or when this worker is asked to end. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._stop_watching()
        try:
            if self.member.lost is None:
                self.member.leave(finished=finished)
        finally:
            self._connections.close()
            self.member.close()
            self._replica.close()

    def _stop_watching(self) -> None:
        self._leaving.stop_listening()
        self._boundary.close()
        self.loads.end()

    @property
    def is_closed(self) -> bool:
        """Whether this worker has left the job."""
        return self._closed

    def abandon(self) -> None:
        """After an error: release everything; other ranks have been informed already."""
        if not self._closed:
            self._closed = True
            self._stop_watching()
            self._connections.close()
            self.member.close()
            self._replica.close()
