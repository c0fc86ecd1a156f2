"""A worker's connections to all servers of its job."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from laconic.core.caller import Caller, Reply, RequestFailed
from laconic.core.connection import Address
from laconic.core.frames import Frame
from laconic.core.moment import Moment
from laconic.core.paced import PacedLink
from laconic.core.plan import Bucket
from laconic.core.transport import Transport
from laconic.errors import CommunicationError, PeerLost, one_line
from laconic.runtime.agreement import with_last_words
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
    STATE,
    Configuration,
    GroupSettings,
)

_CPU = torch.device("cpu")


class ServerAnswer:
    """A request to a server; see core/exchange.py."""

    def __init__(self, reply: Reply, device: torch.device, client: Client) -> None:
        self._reply = reply
        self._device = device
        self._client = client

    def wait(self) -> None:
        """See Work."""
        try:
            self._reply.wait()
        except CommunicationError as exc:
            error = self._client.explain(exc)
            if error is exc:
                raise
            raise error from exc

    def done(self) -> bool:
        """See Work."""
        return self._reply.done()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """See Answer."""
        return tuple(tensor.to(self._device) for tensor in self.frame.tensors)

    @property
    def note(self) -> dict[str, int]:
        """What the server says about its answer."""
        found: dict[str, int] = json.loads(self.frame.note)
        return found

    @property
    def frame(self) -> Frame:
        """The answer as it was sent; waits for it."""
        self.wait()
        return self._reply.frame


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
    """One rank's side of the conversation with every server."""

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
        """`job`: a name no other job has. `started_by_ranks`: each rank in turn has started one."""
        self._transport = transport
        self.failure: CommunicationError | None = None
        """Why servers cannot be used any more, if a request has found that out."""
        self.placement = placement
        """Where each bucket is served."""
        self._callers: list[Caller] = []
        # Not the transport: callers are freed late, and would keep its connection to the job's store.
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
                # At once: those who wait elsewhere must not take this rank, which will end, for the cause.
                problem = f"was lost, says rank {self._transport.rank}: {one_line(self.failure)}"
                self._transport.announce_failure(problem, rank=rank)
        return self.failure

    def _of_those_who_wait(self, error: CommunicationError) -> PeerLost:
        """The error of a server that has waited for some ranks too long: one of them may hold up the others."""
        try:
            silent = self._transport.silent_rank("communication")
        except PeerLost as lost:
            return PeerLost(f"{lost} Also: {error}", rank=lost.rank)
        if silent is None:
            return PeerLost(str(error), rank=self._rank_of(error))
        here = self._transport.rank
        return PeerLost(
            f"communication on rank {here} cannot finish: rank {silent} stopped answering. Also: {error}", rank=silent
        )

    @staticmethod
    def _rank_of(error: CommunicationError) -> int | None:
        """The rank that is lost, as the connection or a server says."""
        if isinstance(error, PeerLost):
            return error.rank
        named = re.search(rf"{LOST}(?:server \d+ of )?rank (\d+) ", str(error))
        return int(named[1]) if named else None

    def configure(self, about: Sequence[Configuration]) -> None:
        """Describe the job to every server; one rank does."""
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

    def reduce(
        self, bucket: int, tensors: tuple[torch.Tensor, ...], *, decoded: bool, moment: Moment, what: str
    ) -> ServerAnswer:
        """See Servers."""
        note = json.dumps({"step": moment.step, "round": moment.round, "decoded": decoded})
        self._count("reduce", tensors)
        return self._send(REDUCE, bucket, tensors, note, f"sum of {what}")

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
        """Start sending the gradient of a bucket to the server that holds its parameters, which answers with these."""
        note = json.dumps({"step": step, "groups": list(groups), "unused": list(unused)})
        self._count("push", tensors)
        return self._send(PUSH, bucket, tensors, note, f"push of {what}")

    def pull(self, bucket: int) -> torch.Tensor:
        """The parameters of a bucket as its server has them."""
        return self._send(PULL, bucket, (), "", f"pull of bucket {bucket}").frame.tensors[0]

    def state(self, bucket: int) -> dict[str, torch.Tensor]:
        """What the server of a bucket remembers about it, keyed "parameter|field|dimensions"."""
        frame = self._send(STATE, bucket, (), "", f"state of bucket {bucket}").frame
        return dict(zip(json.loads(frame.note), frame.tensors, strict=True))

    def restore(self, bucket: int, state: Mapping[str, torch.Tensor], values: torch.Tensor | None) -> ServerAnswer:
        """Start giving the server of a bucket its `state` and, where it holds parameters, their `values`."""
        tensors = (*(() if values is None else (values,)), *state.values())
        return self._send(RESTORE, bucket, tensors, json.dumps(list(state)), f"restoring bucket {bucket}")

    def rest(self) -> None:
        """Tell every server that this rank is about to wait for the others elsewhere."""
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
        for caller in self._callers:
            caller.close()
