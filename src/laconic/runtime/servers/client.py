"""A worker's connections to all servers of its job."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from laconic.core.caller import Caller, Reply
from laconic.core.connection import Address
from laconic.core.moment import Moment
from laconic.core.paced import PacedLink
from laconic.core.plan import Bucket
from laconic.core.transport import Transport
from laconic.errors import CommunicationError, PeerLost
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


class ServerAnswer:
    """A request to a server; see core/exchange.py."""

    def __init__(self, reply: Reply, device: torch.device, transport: Transport) -> None:
        self._reply = reply
        self._device = device
        self._transport = transport

    def wait(self) -> None:
        """See Work."""
        try:
            self._reply.wait()
        except CommunicationError as exc:
            if not isinstance(exc, PeerLost) and LOST not in str(exc):
                raise
            lost = PeerLost(str(exc))
            # Who is gone may have said why, and a server ends with the rank that started it.
            gone = isinstance(exc, PeerLost) or GONE in str(exc)
            raise (with_last_words(lost, self._transport) if gone else lost) from exc

    def done(self) -> bool:
        """See Work."""
        return self._reply.done()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """See Answer."""
        return tuple(tensor.to(self._device) for tensor in self._reply.frame.tensors)

    @property
    def note(self) -> dict[str, int]:
        """What the server says about its answer."""
        found: dict[str, int] = json.loads(self._reply.frame.note)
        return found


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
        beside: bool,
        link: PacedLink | None = None,
    ) -> None:
        """`job`: a name no other job has. `beside`: servers were started by the ranks, in turn."""
        self._transport = transport
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
                        name=f"server {number}" + (f" of rank {number % transport.world_size}" if beside else ""),
                        connect_timeout_s=min(60.0, timeout_s),
                        count=lambda payload, overhead: traffic.count("control", "frames", overhead),
                        link=link,
                    )
                )
            self._ask_all(JOIN, job, what="joining")
        except CommunicationError:
            self.hang_up()
            raise

    def _ask_all(self, kind: int, note: str = "", *, what: str) -> None:
        replies = [caller.call(kind, note=note, what=what) for caller in self._callers]
        for reply in replies:
            reply.wait()

    def configure(self, about: Sequence[Configuration], values: Mapping[int, torch.Tensor]) -> None:
        """Tell every server about the job; one rank does."""
        replies = [
            caller.call(
                CONFIGURE,
                tensors=[values[number].cpu() for number in one.buckets] if values else [],
                note=one.write(),
                what="telling servers about the job",
            )
            for caller, one in zip(self._callers, about, strict=True)
        ]
        for reply in replies:
            reply.wait()

    def _caller(self, bucket: int) -> Caller:
        return self._callers[self.placement.owners[bucket]]

    def _count(self, operation: str, tensors: Sequence[torch.Tensor]) -> None:
        self._transport.traffic.count("payload", operation, sum(tensor.nbytes for tensor in tensors))

    def reduce(
        self, bucket: int, tensors: tuple[torch.Tensor, ...], *, decoded: bool, moment: Moment, what: str
    ) -> ServerAnswer:
        """See Servers."""
        note = json.dumps({"step": moment.step, "round": moment.round, "decoded": decoded})
        self._count("reduce", tensors)
        sent = [tensor.reshape(-1).cpu() for tensor in tensors]
        return ServerAnswer(
            self._caller(bucket).call(REDUCE, key=bucket, tensors=sent, note=note, what=f"sum of {what}"),
            tensors[0].device if tensors else torch.device("cpu"),
            self._transport,
        )

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
        sent = [tensor.reshape(-1).cpu() for tensor in tensors]
        return ServerAnswer(
            self._caller(bucket).call(PUSH, key=bucket, tensors=sent, note=note, what=f"push of {what}"),
            tensors[0].device if tensors else torch.device("cpu"),
            self._transport,
        )

    def pull(self, bucket: int) -> torch.Tensor:
        """The parameters of a bucket as its server has them."""
        reply = self._caller(bucket).call(PULL, key=bucket, what=f"pull of bucket {bucket}")
        return reply.frame.tensors[0]

    def state(self, bucket: int) -> dict[str, torch.Tensor]:
        """What the server of a bucket remembers about it, keyed "parameter|field|dimensions"."""
        frame = self._caller(bucket).call(STATE, key=bucket, what=f"state of bucket {bucket}").frame
        return dict(zip(json.loads(frame.note), frame.tensors, strict=True))

    def restore(self, bucket: int, state: Mapping[str, torch.Tensor], values: torch.Tensor | None) -> None:
        """Have the server of a bucket continue from `state` and, where it holds parameters, from `values`."""
        tensors = [*([] if values is None else [values.cpu()]), *(value.reshape(-1).cpu() for value in state.values())]
        what = f"restoring bucket {bucket}"
        self._caller(bucket).call(RESTORE, key=bucket, tensors=tensors, note=json.dumps(list(state)), what=what).wait()

    def rest(self) -> None:
        """Tell every server that this rank is about to wait for the others elsewhere."""
        self._ask_all(REST, what="rest")

    def leave(self) -> None:
        """Say goodbye to every server."""
        self._ask_all(BYE, what="goodbye")

    def missing(self, server: int) -> tuple[list[int], float]:
        """Ranks that have not said goodbye to a server, and for how many seconds it has heard of nobody."""
        note = json.loads(self._callers[server].call(MISSING, what="goodbye of the others").frame.note)
        return note["ranks"], note["quiet_s"]

    def hang_up(self) -> None:
        """Close all connections."""
        for caller in self._callers:
            caller.close()
