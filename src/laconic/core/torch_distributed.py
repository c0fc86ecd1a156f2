"""The transport over torch.distributed: Gloo, NCCL or whatever backend the process group has.

It makes a process group of its own with the same ranks, so laconic's operations never mix with those the training
script issues. A wait that fails finds out who is to blame (see heartbeat.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from laconic.core.heartbeat import Heartbeat
from laconic.core.hosts import Hosts, hosts_of, name_of_host
from laconic.core.job_store import JobStore
from laconic.core.meeting import Meeting
from laconic.core.tallies import Tallies
from laconic.core.transport import (
    DETACHED,
    DoneWork,
    Purpose,
    ReduceOp,
    Traffic,
    Work,
    all_gather_sent,
    all_reduce_sent,
    broadcast_sent,
    shard_exchange_sent,
)
from laconic.errors import AttachError, CommunicationError, one_line

_SLICE_S = 0.5
"""How long a wait sleeps before it looks whether a peer has failed."""
_GLOO_SEGMENT_BYTES = 1024 * 1024
"""The largest piece in which Gloo's ring sends."""
_LARGE_ROW_BYTES = 256 * 1024
"""From here on rows between ranks go faster as messages than in Gloo's all-to-all."""

# torch 2.13 renamed these; the old names warn there and the new ones do not exist in 2.11.
_all_gather_flat: Callable[..., dist.Work] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat: Callable[..., dist.Work] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


class TorchTransport:
    """One rank of a torch.distributed process group."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = 300.0) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise AttachError(
                "no process group: call torch.distributed.init_process_group() first and start the script with "
                "torchrun, or pass transport= to run without a cluster."
            )
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise AttachError("this rank is not a member of the process group given as process_group.")
        parent = group or dist.group.WORLD
        assert parent is not None
        self.timeout_s = timeout_s
        self.in_process = False
        self.link = None
        self.rank = dist.get_rank(parent)
        self.world_size = dist.get_world_size(parent)
        self.traffic = Traffic()
        config = str(dist.get_backend_config(parent))  # e.g. "cpu:gloo,cuda:nccl"
        self._backends = dict(item.split(":", 1) for item in config.split(","))
        self.control_device = (
            torch.device("cpu") if "cpu" in self._backends else torch.device("cuda", torch.cuda.current_device())
        )
        self.description = f"torch.distributed, {config}, {self.world_size} ranks"
        self._group: dist.ProcessGroup | None = None
        self._may_destroy = False
        self._taken = False
        self._heartbeat: Heartbeat | None = None
        self._questions: JobStore | None = None
        self._tallies: Tallies | None = None
        self.hosts: Hosts = ((0,),)
        if self.world_size == 1:
            return
        meeting = Meeting(self.rank, parent, timeout_s)
        self._questions, place = meeting.questions, meeting.place
        self._heartbeat = Heartbeat(meeting.beats, f"{place}/beats", self.rank, self.world_size, timeout_s)
        try:
            # Before a group is made: who does not come is named here.
            advice = "every rank of the process group must call laconic.attach"
            names = self._heartbeat.gather_texts(name_of_host(), what="attaching", exchange=0, advice=advice)
            self.hosts = hosts_of(names)
            self._group, self._may_destroy = meeting.group(config, self._heartbeat)
        except BaseException:
            self.close()
            raise
        self._heartbeat.group = self._group
        self._tallies = Tallies(self._questions.under(place), self._heartbeat)

    def _start(
        self,
        issue: Callable[[dist.ProcessGroup], dist.Work | Sequence[dist.Work] | None],
        device: torch.device,
        *,
        operation: str,
        sent: int,
        purpose: Purpose,
        what: str,
        peers: bool = False,
    ) -> Work:
        """peers: `issue` sends and receives between pairs of ranks."""
        if self._group is None or self._heartbeat is None:
            raise CommunicationError("the transport is closed; attach again to communicate.")
        label = f"{operation} of {what or 'a tensor'}"
        self.traffic.count(purpose, operation, sent)
        try:
            works = issue(self._group)
        except RuntimeError as exc:
            raise self._heartbeat.explain(label, one_line(exc)) from exc
        started = [works] if isinstance(works, dist.Work) else list(works or [])
        if device.type == "cuda" and self._backends.get("cuda") != "gloo":
            return _DeviceWork(started, label, self._heartbeat)
        if peers:
            return _PeerWork(started, label, self._heartbeat, self.timeout_s)
        return _HostWork(started, label, self._heartbeat, self.timeout_s)

    def all_reduce(
        self, tensor: torch.Tensor, *, op: ReduceOp = "sum", purpose: Purpose = "payload", what: str = ""
    ) -> Work:
        """See Transport."""
        if self.world_size == 1:
            return DoneWork()
        kind = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
        return self._start(
            lambda group: dist.all_reduce(tensor, op=kind, group=group, async_op=True),
            tensor.device,
            operation=f"all_reduce({op})",
            sent=all_reduce_sent(tensor.nbytes, self.world_size),
            purpose=purpose,
            what=what,
        )

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, purpose: Purpose = "payload", what: str = "") -> Work:
        """See Transport."""
        if self.world_size == 1:
            return DoneWork()
        return self._start(
            lambda group: dist.broadcast(tensor, group=group, group_src=source, async_op=True),
            tensor.device,
            operation=f"broadcast({source})",
            sent=broadcast_sent(tensor.nbytes, self.world_size, (self.rank - source) % self.world_size),
            purpose=purpose,
            what=what,
        )

    def all_gather(
        self, output: torch.Tensor, tensor: torch.Tensor, *, purpose: Purpose = "payload", what: str = ""
    ) -> Work:
        """See Transport."""
        if self.world_size == 1:
            output[0].copy_(tensor)
            return DoneWork()
        return self._start(
            lambda group: _all_gather_flat(output.view(-1), tensor.reshape(-1), group=group, async_op=True),
            tensor.device,
            operation="all_gather",
            sent=all_gather_sent(tensor.nbytes, self.world_size),
            purpose=purpose,
            what=what,
        )

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, *, purpose: Purpose = "payload", what: str = ""
    ) -> Work:
        """See Transport."""
        if self.world_size == 1:
            output.copy_(tensor[0])
            return DoneWork()
        if self._backends.get(tensor.device.type) != "gloo":
            return self._start(
                lambda group: _reduce_scatter_flat(output.view(-1), tensor.reshape(-1), group=group, async_op=True),
                tensor.device,
                operation="reduce_scatter",
                sent=shard_exchange_sent(tensor.nbytes, self.world_size),
                purpose=purpose,
                what=what,
            )
        # Gloo's own reduce-scatter sends as much as an all-reduce; shards summed here cost half of that.
        shards = torch.empty_like(tensor)
        work = self._swap_rows(shards, tensor.contiguous(), "reduce_scatter", purpose, what)
        return _ThenSum(work, shards, output, self.rank)

    def all_to_all(
        self, output: torch.Tensor, tensor: torch.Tensor, *, purpose: Purpose = "payload", what: str = ""
    ) -> Work:
        """See Transport."""
        if self.world_size == 1:
            output.copy_(tensor)
            return DoneWork()
        return self._swap_rows(output, tensor, "all_to_all", purpose, what)

    def _swap_rows(
        self, output: torch.Tensor, tensor: torch.Tensor, operation: str, purpose: Purpose, what: str
    ) -> Work:
        """Fill row r of `output` with row `rank` of rank r's `tensor`."""
        device = tensor.device
        as_messages = (
            device.type == "cpu" and self._backends.get("cpu") == "gloo" and tensor[0].nbytes >= _LARGE_ROW_BYTES
        )

        def issue(group: dist.ProcessGroup) -> dist.Work | Sequence[dist.Work] | None:
            if not as_messages:
                return dist.all_to_all_single(output, tensor, group=group, async_op=True)
            output[self.rank].copy_(tensor[self.rank])
            distances = range(1, self.world_size)
            places = [((self.rank + far) % self.world_size, (self.rank - far) % self.world_size) for far in distances]
            return _messages(group, [(to, tensor[to]) for to, _ in places], [(of, output[of]) for _, of in places])

        return self._start(
            issue,
            device,
            operation=operation,
            sent=shard_exchange_sent(tensor.nbytes, self.world_size),
            purpose=purpose,
            what=what,
            peers=as_messages,
        )

    def send_receive(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
        *,
        purpose: Purpose = "payload",
        what: str = "",
    ) -> Work:
        """See Transport."""
        if not sends and not receives:
            return DoneWork()

        return self._start(
            lambda group: _messages(group, sends, receives),
            next(tensor for _, tensor in (*sends, *receives)).device,
            operation="send_receive",
            sent=sum(tensor.nbytes for _, tensor in sends),
            purpose=purpose,
            what=what,
            peers=True,
        )

    def tally(self, name: str, amount: int) -> int:
        """See Transport; asks the job's store."""
        return self._open_tallies().add(name, amount)

    def drop_tally(self, name: str) -> None:
        """See Transport."""
        self._open_tallies().drop(name)

    def _open_tallies(self) -> Tallies:
        if self._tallies is None:
            raise CommunicationError("the transport is closed or has one rank only; nothing is counted together.")
        return self._tallies

    def acquire(self) -> None:
        """See Transport."""
        if self._taken:
            raise AttachError("this transport already carries a session; detach that one or use another transport.")
        self._taken = True
        self.set_status("attaching", exchange=0)

    def release(self) -> None:
        """See Transport."""
        self._taken = False
        self.set_status(DETACHED)

    def set_status(self, status: str, *, exchange: int | None = None) -> None:
        """See Transport."""
        if self._heartbeat is not None:
            self._heartbeat.status = status
            if exchange is not None:
                self._heartbeat.exchange = exchange

    def gather_texts(self, text: str, *, what: str, exchange: int, advice: str) -> list[str]:
        """See Transport; by way of the job's store."""
        if self.world_size == 1:
            return [text]
        if self._heartbeat is None:
            raise CommunicationError("the transport is closed; attach again to communicate.")
        return self._heartbeat.gather_texts(text, what=what, exchange=exchange, advice=advice)

    def wait_for(self, event: threading.Event, what: str, *, heard_s: Callable[[], float]) -> None:
        """See Transport."""
        if self._heartbeat is not None:
            self._heartbeat.wait_for(event, what, heard_s=heard_s)

    def waiting_until(self, deadline_s: float) -> AbstractContextManager[None]:
        """See Transport."""
        return nullcontext() if self._heartbeat is None else self._heartbeat.waiting_until(deadline_s)

    def silent_rank(self, operation: str) -> int | None:
        """See Transport."""
        return None if self._heartbeat is None else self._heartbeat.silent_rank(operation)

    def known_failure(self) -> CommunicationError | None:
        """See Transport."""
        return self._heartbeat.lost if self._heartbeat is not None else None

    def raise_if_peer_failed(self) -> None:
        """See Transport."""
        if self._heartbeat is not None:
            self._heartbeat.check("communication")

    def announce_failure(self, reason: str, *, rank: int | None = None) -> None:
        """See Transport."""
        if self._heartbeat is not None:
            self._heartbeat.fail(self.rank if rank is None else rank, reason)

    def close(self) -> None:
        """See Transport."""
        self._tallies = None
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.stop()
        group, self._group = self._group, None
        if group is not None and dist.is_initialized() and self._may_destroy:
            dist.destroy_process_group(group)
        questions, self._questions = self._questions, None
        if questions is not None:
            questions.cut()


class _DeviceWork:
    """Operations the device carries out: waiting makes the current stream wait, not the host."""

    def __init__(self, works: list[dist.Work], operation: str, heartbeat: Heartbeat) -> None:
        self._works = works
        self._operation = operation
        self._heartbeat = heartbeat

    def wait(self) -> None:
        for work in self._works:
            work.wait()  # without a time limit: with one, NCCL makes the host wait
        finished = torch.cuda.Event()
        finished.record()
        # The event, not the works: those would keep their tensors in memory.
        self._heartbeat.watch(self._operation, finished)

    def done(self) -> bool:
        return True


class _HostWork:
    """Operations the host waits for, a slice of time at a time."""

    def __init__(self, works: list[dist.Work], operation: str, heartbeat: Heartbeat, timeout_s: float) -> None:
        self._works = works
        self._operation = operation
        self._heartbeat = heartbeat
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s

    def wait(self) -> None:
        with self._heartbeat.waiting_until(self._deadline_s):
            self._wait()

    def _wait(self) -> None:
        for work in self._works:
            while True:
                try:
                    work.wait(timedelta(seconds=_SLICE_S))
                    break
                except RuntimeError as exc:
                    # Gloo says "timed out" both when the slice ends and when the operation itself gave up.
                    if "timed out" not in str(exc).lower():
                        raise self._heartbeat.explain(self._operation, one_line(exc)) from exc
                    if work.is_completed():
                        self._end_of(work)
                        break
                    self._heartbeat.check(self._operation)
                    if time.monotonic() >= self._deadline_s:
                        raise self._heartbeat.explain(
                            self._operation, f"did not finish in {self._timeout_s:g} s", timed_out=True
                        ) from exc

    def _end_of(self, work: dist.Work) -> None:
        """Return if a completed operation went well, which it may have done just after a slice had ended."""
        try:
            work.wait()
        except RuntimeError as exc:
            raise self._heartbeat.explain(self._operation, one_line(exc)) from exc

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)


class _PeerWork:
    """Sends and receives between two ranks, which the host waits for in one piece.

    Gloo closes all connections when the time given to such a wait is up, so it cannot be had in slices. A peer that
    ends is noticed at once, because its connections break; one that stands still, when the time is up.
    """

    def __init__(self, works: list[dist.Work], operation: str, heartbeat: Heartbeat, timeout_s: float) -> None:
        self._works = works
        self._operation = operation
        self._heartbeat = heartbeat
        self._deadline_s = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._waited = False

    def wait(self) -> None:
        with self._heartbeat.waiting_until(self._deadline_s):
            self._wait()

    def _wait(self) -> None:
        for work in [] if self._waited else self._works:
            left_s = max(0.001, self._deadline_s - time.monotonic())
            try:
                work.wait(timedelta(seconds=left_s))
            except RuntimeError as exc:
                timed_out = "timed out" in str(exc).lower() and time.monotonic() >= self._deadline_s
                cause = f"did not finish in {self._timeout_s:g} s" if timed_out else one_line(exc)
                raise self._heartbeat.explain(self._operation, cause, timed_out=timed_out) from exc
        self._waited = True

    def done(self) -> bool:
        # Gloo knows only once somebody has waited.
        return self._waited


class _ThenSum:
    """Shards that are added up once they are there, in the order of Gloo's own ring, so that every bit is as there."""

    def __init__(self, work: Work, shards: torch.Tensor, output: torch.Tensor, rank: int) -> None:
        self._work = work
        self._shards = shards
        self._output = output
        self._rank = rank

    def wait(self) -> None:
        self._work.wait()
        rows, total = self._shards.view(len(self._shards), -1), self._output.view(-1)
        for begin, end, last in _ring_chunks(rows.shape[1], total.element_size(), self._rank, len(rows)):
            part = total[begin:end]
            part.copy_(rows[last - 1, begin:end])
            for far in range(2, len(rows) + 1):
                part += rows[(last - far) % len(rows), begin:end]

    def done(self) -> bool:
        return self._work.done()


def _ring_chunks(numel: int, element_bytes: int, rank: int, world_size: int) -> Iterator[tuple[int, int, int]]:
    """How Gloo's ring adds up row `rank` of n rows: from element to element, and the rank whose values come last.

    A ring goes around n chunks of the whole, each of which is added up from the rank before its own backwards. Chunks
    are whole numbers of segments, so their borders are not quite those of the rows.
    """
    total_bytes = world_size * numel * element_bytes
    most_bytes = element_bytes * max(1, _GLOO_SEGMENT_BYTES // element_bytes)
    num_segments = max(-(-total_bytes // most_bytes), 2 * world_size)
    per_rank = -(-num_segments // world_size)
    segment_bytes = -(-total_bytes // (per_rank * world_size))
    chunk = per_rank * -(-segment_bytes // element_bytes)
    begin = rank * numel
    while begin < (rank + 1) * numel:
        end = min((begin // chunk + 1) * chunk, (rank + 1) * numel)
        yield begin - rank * numel, end - rank * numel, begin // chunk
        begin = end


def _messages(
    group: dist.ProcessGroup, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
) -> Sequence[dist.Work]:
    # Receives first: Gloo tells the sender that a receive is posted over the same socket, where that would queue behind
    # a large send, and what two ranks swap would go one way after the other.
    operations = [dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer) for peer, tensor in receives]
    operations += [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for peer, tensor in sends]
    return dist.batch_isend_irecv(operations)
