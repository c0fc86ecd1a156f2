"""A worker's connections to all servers of its job."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from laconic.core.caller import Caller, Reply, RequestFailed
from laconic.core.connection import Address
from laconic.core.exchange import Answer
from laconic.core.frames import Frame
from laconic.core.moment import Moment
from laconic.core.paced import PacedLink
from laconic.core.plan import Bucket
from laconic.core.transport import Transport, Work
from laconic.errors import CommunicationError, PeerLost, one_line
from laconic.runtime.agreement import with_last_words
from laconic.runtime.datagrams import Datagrams
from laconic.runtime.in_network.request import Request
from laconic.runtime.in_network.worker import SlotWorker
from laconic.runtime.servers.protocol import (
    BYE,
    CONFIGURE,
    GONE,
    JOIN,
    LOST,
    MISSING,
    PULL,
    PUSH,
    REDUCE,
    REST,
    RESTORE,
    SLOTS,
    STATE,
    Configuration,
    GroupSettings,
    patience_s,
)

_CPU = torch.device("cpu")


class ServerAnswer:
    """A request to a server; see core/exchange.py."""

    def __init__(self, reply: Reply, device: torch.device, client: Client) -> None:
        self._reply = reply
        self._device = device
        self._client = client

    def wait(self) -> None:
        self._client.wait(self._reply)

    def done(self) -> bool:
        return self._reply.done()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.to(self._device) for tensor in self.frame.tensors)

    @property
    def note(self) -> dict[str, int]:
        """The note in the server's answer."""
        found: dict[str, int] = json.loads(self.frame.note)
        return found

    @property
    def frame(self) -> Frame:
        """The frame of the answer; waits for it."""
        self.wait()
        return self._reply.frame


class SlotAnswer:
    """A sum that is formed in the slots of a server; see core/exchange.py."""

    def __init__(self, request: Request, device: torch.device, client: Client) -> None:
        self._request = request
        self._device = device
        self._client = client

    def wait(self) -> None:
        self._client.wait(self._request)

    def done(self) -> bool:
        return self._request.done()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        self.wait()
        return tuple(total.to(self._device) for total in self._request.sums)


@dataclass(frozen=True)
class Placement:
    """Where each bucket is served."""

    buckets: tuple[Bucket, ...]
    owners: tuple[int, ...]

    def of(self, server: int) -> dict[int, Bucket]:
        """The buckets of one server by number."""
        return {
            number: bucket
            for number, (bucket, owner) in enumerate(zip(self.buckets, self.owners, strict=True))
            if owner == server
        }


class Client:
    """One rank's connections to every server."""

    def __init__(
        self,
        addresses: Sequence[Address],
        placement: Placement,
        transport: Transport,
        *,
        job: str,
        token: bytes,
        timeout_s: float,
        started_by_ranks: bool,
        link: PacedLink | None = None,
    ) -> None:
        """`job`: a unique name. `started_by_ranks`: the ranks have started the servers, each in turn."""
        self._transport = transport
        self.failure: CommunicationError | None = None
        """Why servers cannot be used any more, if a request has failed."""
        self.placement = placement
        """Where each bucket is served."""
        self._callers: list[Caller] = []
        self._slots: SlotWorker | None = None
        self.num_slots = 0
        """Slots in which sums are formed; 0: they are formed of whole tensors."""
        self._timeout_s = timeout_s
        self._link = link
        # No reference to the transport: callers are freed late, and would keep its connection to the job's store open.
        traffic = transport.traffic
        try:
            for number, address in enumerate(addresses):
                self._callers.append(
                    Caller(
                        address,
                        token=token,
                        rank=transport.rank,
                        timeout_s=timeout_s,
                        name=f"server {number} of rank {number % transport.world_size}"
                        if started_by_ranks
                        else f"server {number}",
                        peer=number % transport.world_size if started_by_ranks else None,
                        connect_timeout_s=min(60.0, timeout_s),
                        count=lambda payload, overhead: traffic.count("control", "frames", overhead),
                        link=link,
                    )
                )
            self._ask_all(JOIN, job, what="joining")
        except BaseException:
            self.hang_up()
            raise

    def _ask(
        self,
        server: int,
        kind: int,
        key: int = 0,
        tensors: Sequence[torch.Tensor] = (),
        note: str = "",
        *,
        what: str,
        device: torch.device = _CPU,
    ) -> ServerAnswer:
        try:
            reply = self._callers[server].call(kind, key, tensors, note, what=what)
        except CommunicationError as exc:
            error = self.explain(exc)
            if error is exc:
                raise
            raise error from exc
        return ServerAnswer(reply, device, self)

    def _ask_all(self, kind: int, note: str = "", *, what: str) -> None:
        answers = [self._ask(server, kind, note=note, what=what) for server in range(len(self._callers))]
        for answer in answers:
            answer.wait()

    def wait(self, reply: Work) -> None:
        """Return when an answer has arrived, or raise with the known reason why it does not come."""
        try:
            if reply.done():
                reply.wait()
                return
            # A server gives up first: by then this rank must know which rank has stopped answering.
            with self._transport.waiting_until(time.monotonic() + patience_s(self._transport.timeout_s)):
                reply.wait()
        except CommunicationError as exc:
            error = self.explain(exc)
            if error is exc:
                raise
            raise error from exc

    def explain(self, error: CommunicationError) -> CommunicationError:
        """The error of a request, with the reason of the rank that caused it if that rank has given one."""
        lost = isinstance(error, PeerLost) or LOST in str(error)
        if isinstance(error, RequestFailed) and not lost:
            return error
        if self.failure is None:
            self.failure = error
            # A rank that has ended may have said why, and a server ends with the rank that started it.
            if isinstance(error, PeerLost) or GONE in str(error):
                self.failure = with_last_words(PeerLost(str(error), rank=self._rank_of(error)), self._transport)
            elif lost:
                self.failure = self._of_those_who_wait(error)
            rank = self.failure.rank if isinstance(self.failure, PeerLost) else None
            if rank is not None:
                # At once: ranks that wait elsewhere must not take this rank, which will end, for the cause.
                problem = f"was lost, says rank {self._transport.rank}: {one_line(self.failure)}"
                self._transport.announce_failure(problem, rank=rank)
        return self.failure

    def _of_those_who_wait(self, error: CommunicationError) -> PeerLost:
        """The error of a server that has waited too long for some ranks: one of them may block the others."""
        named = self._rank_of(error)
        if named is not None:
            return PeerLost(str(error), rank=named)
        try:
            silent = self._transport.silent_rank("communication")
        except PeerLost as lost:
            return PeerLost(f"{lost} Also: {error}", rank=lost.rank)
        if silent is None:
            return PeerLost(str(error))
        here = self._transport.rank
        return PeerLost(
            f"communication on rank {here} cannot finish: rank {silent} stopped answering. Also: {error}", rank=silent
        )

    @staticmethod
    def _rank_of(error: CommunicationError) -> int | None:
        """The lost rank, as reported by the connection or a server."""
        if isinstance(error, PeerLost):
            return error.rank
        named = re.search(rf"{LOST}(?:server \d+ of )?rank (\d+) ", str(error))
        return int(named[1]) if named else None

    def configure(self, about: Sequence[Configuration]) -> None:
        """Describe the job to every server; one rank calls it."""
        what = "configuration of servers"
        answers = [self._ask(server, CONFIGURE, note=one.write(), what=what) for server, one in enumerate(about)]
        for answer in answers:
            answer.wait()

    def _count(self, operation: str, tensors: Sequence[torch.Tensor]) -> None:
        self._transport.traffic.count("payload", operation, sum(tensor.nbytes for tensor in tensors))

    def _send(self, kind: int, bucket: int, tensors: tuple[torch.Tensor, ...], note: str, what: str) -> ServerAnswer:
        sent = [tensor.reshape(-1).cpu() for tensor in tensors]
        device = tensors[0].device if tensors else _CPU
        return self._ask(self.placement.owners[bucket], kind, bucket, sent, note, what=what, device=device)

    def open_slots(self) -> None:
        """Form sums in the slots of the first server from now on, if it has any."""
        server = self._callers[0]
        found = self._ask(0, SLOTS, what="asking for slots").note
        self.num_slots = found["slots"]
        if self.num_slots:
            transport = self._transport
            self._slots = SlotWorker(
                Datagrams(server.local_host),
                (server.address[0], found["port"]),
                rank=transport.rank,
                world_size=transport.world_size,
                num_slots=self.num_slots,
                tag=found["tag"],
                timeout_s=self._timeout_s,
                lost=server.why_lost,
                traffic=transport.traffic,
                link=self._link,
            )

    def reduce(
        self, bucket: int, tensors: tuple[torch.Tensor, ...], *, decoded: bool, moment: Moment, what: str
    ) -> Answer:
        if self._slots is not None and not decoded:
            return self._in_slots(self._slots, tensors, f"sum of {what}")
        note = json.dumps({"step": moment.step, "round": moment.round, "decoded": decoded})
        self._count("reduce", tensors)
        return self._send(REDUCE, bucket, tensors, note, f"sum of {what}")

    def _in_slots(self, slots: SlotWorker, tensors: tuple[torch.Tensor, ...], what: str) -> SlotAnswer:
        self._count("aggregate", tensors)
        try:
            request = slots.sum([tensor.detach().cpu().contiguous() for tensor in tensors], what=what)
        except CommunicationError as exc:
            raise self.explain(exc) from exc
        return SlotAnswer(request, tensors[0].device if tensors else _CPU, self)

    def push(
        self,
        bucket: int,
        tensors: tuple[torch.Tensor, ...],
        *,
        step: int,
        groups: Sequence[GroupSettings],
        unused: Sequence[int],
        what: str,
    ) -> ServerAnswer:
        """Start sending the gradient of a bucket to the server that holds its parameters; it answers with them."""
        note = json.dumps({"step": step, "groups": list(groups), "unused": list(unused)})
        self._count("push", tensors)
        return self._send(PUSH, bucket, tensors, note, f"push of {what}")

    def pull(self, bucket: int) -> torch.Tensor:
        """The current parameters of a bucket on its server."""
        return self._send(PULL, bucket, (), "", f"pull of bucket {bucket}").frame.tensors[0]

    def state(self, bucket: int) -> dict[str, torch.Tensor]:
        """The state of a bucket on its server, keyed "parameter|field|dimensions"."""
        frame = self._send(STATE, bucket, (), "", f"state of bucket {bucket}").frame
        return dict(zip(json.loads(frame.note), frame.tensors, strict=True))

    def restore(self, bucket: int, state: Mapping[str, torch.Tensor], values: torch.Tensor | None) -> ServerAnswer:
        """Start sending the server of a bucket its `state` and, where it holds parameters, their `values`."""
        tensors = (*(() if values is None else (values,)), *state.values())
        return self._send(RESTORE, bucket, tensors, json.dumps(list(state)), f"restoring bucket {bucket}")

    def rest(self) -> None:
        """Announce to every server that this rank is about to wait for the others elsewhere."""
        self._ask_all(REST, what="rest")

    def leave(self) -> None:
        """Say goodbye to every server."""
        self._ask_all(BYE, what="goodbye")

    def missing(self, server: int) -> tuple[list[int], float]:
        """Ranks that have not said goodbye to a server, and for how many seconds no rank has sent it a request."""
        note = json.loads(self._ask(server, MISSING, what="goodbye of the others").frame.note)
        return note["ranks"], note["quiet_s"]

    def hang_up(self) -> None:
        """Close all connections."""
        if self._slots is not None:
            self._slots.close()
        for caller in self._callers:
            caller.close()
