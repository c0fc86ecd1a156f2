"""The contract between WHAT is sent and WITH WHOM: a compressor asks a Group for sums or gathers, in rounds.

An exchange is a generator that yields the Work of each round it has issued and is resumed when that round is done,
so one thread can keep many exchanges in flight and every rank issues them in the same order.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from laconic.core.hosts import Hosts
from laconic.core.moment import Moment
from laconic.core.sent_bytes import all_gather_sent, all_reduce_sent, as_it_is_sent, shard_exchange_sent
from laconic.core.transport import AllWork, Transport, Work

RoundKind = Literal["sum", "gather", "scatter", "send"]
"""sum: every rank gets the sum. gather: every rank gets all contributions. scatter: of n rows, row r goes to rank r.
send: these bytes go to one other rank."""


@dataclass(frozen=True)
class Round:
    """One round of an exchange as data: the contribution of every rank, and how contributions are combined."""

    kind: RoundKind
    sizes: tuple[int, ...]
    """Bytes of each tensor a rank contributes."""


_SENT = {"sum": all_reduce_sent, "gather": all_gather_sent, "scatter": shard_exchange_sent, "send": as_it_is_sent}


def round_sent(round: Round, world_size: int) -> int:
    """Bytes one of n ranks sends for `round`, as the backend's ring sends it."""
    return sum(_SENT[round.kind](size, world_size) for size in round.sizes) if world_size > 1 else 0


MoveKind = Literal[
    "sum",
    "scatter_sum",
    "gather",
    "scatter",
    "scatter_inside",
    "scatter_between",
    "send",
    "to_leaders",
    "from_leaders",
    "serve",
    "mix",
    "aggregate",
]
"""Operations of all ranks at the same time: the kinds of a round, and

scatter_sum: each rank gets its share of the sum. scatter_inside: a scatter among the ranks of each host.
scatter_between: one among the first ranks of all hosts, one among the second ones, and so on. to_leaders, from_leaders:
one rank of each host gets the sum of its host, and distributes the result. serve: a server gets these bytes of every
rank and answers each. mix: every rank sends these bytes to each of its neighbours. aggregate: these bytes of every rank
are added up on the network path, frame by frame, and come back."""


@dataclass(frozen=True)
class Move:
    """One network operation as data, whose cost a simulator computes; an exchange makes one or several in sequence."""

    kind: MoveKind
    sizes: tuple[int, ...]
    """Bytes of each tensor a rank contributes."""
    algorithm: str = "native"
    """How a sum is formed, or one half of it."""
    peers: int = 1
    """Neighbours a rank sends to."""
    topology: str = ""
    """The name of the graph that determines these neighbours."""
    partners: tuple[tuple[int, ...], ...] = ()
    """Where the graph follows from measured links: the partner of every rank in each round of a cycle."""
    answer_bytes: int = 0
    """Bytes of a server's answer to each rank."""
    among_hosts: bool = False
    """Only one rank of each host takes part."""
    server: int = -1
    """The server that adds up, where that is known; -1: any of them."""
    slots: int = 0
    """Frames of a rank that an aggregator can have at a time."""
    groups: Hosts = ()
    """The groups that take the place of hosts, where ranks are grouped and ordered otherwise."""
    shares: tuple[float, ...] = ()
    """The share of all bytes that each server gets; none: equal shares."""

    @property
    def nbytes(self) -> int:
        """The bytes that a rank contributes."""
        return sum(self.sizes)


Exchange = Generator[Work, None, None]


class Answer(Work, Protocol):
    """A request to a server."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The server's answer, once the work is done, on the device of the request."""
        ...


class Servers(Protocol):
    """Server processes that form sums, as an architecture sees them."""

    def reduce(
        self, bucket: int, tensors: tuple[torch.Tensor, ...], *, decoded: bool, moment: Moment, what: str
    ) -> Answer:
        """Start sending this rank's tensors to the server of `bucket`, which answers once all ranks have sent theirs.

        decoded: the server decodes each rank's payload, sums them and answers with an encoded sum; else it sums the
        tensors directly.
        """
        ...


class PartialSum(Work, Protocol):
    """A sum over all ranks, formed of the contributions that have arrived."""

    @property
    def rows(self) -> torch.Tensor:
        """The sum, once the work is done, in the shape and on the device of what was sent; the same on every rank."""
        ...

    @property
    def lost_ratio(self) -> float:
        """The share of the data sent to this rank that is missing in the sums it has formed."""
        ...


class PartialMeans(Protocol):
    """Ranks that send each other datagrams, of which some may be lost, as an architecture sees them."""

    def reduce(self, rows: torch.Tensor, *, what: str) -> PartialSum:
        """Start adding up a table: rows[r] goes to rank r, which adds up what arrives in time and sends the sum to all.

        Missing contributions to a row count as the mean of those that have arrived.
        """
        ...


@dataclass(frozen=True)
class Wire:
    """The transport and labels of one exchange."""

    transport: Transport
    what: str
    """A description for error messages."""
    bucket: int = 0
    """The number of the bucket in the plan."""
    servers: Servers | None = None
    """The servers, where the architecture has any."""
    decoupled: bool = False
    """Sums are formed in two rounds: a reduce-scatter, then an all-gather."""
    partial_means: PartialMeans | None = None
    """The means over datagrams, where the architecture tolerates that some are lost."""


def one_round(work: Work) -> Exchange:
    """An exchange that consists of one operation already started."""
    yield work


def in_lockstep(*exchanges: Exchange) -> Exchange:
    """Several exchanges as one: each wait covers one round of every exchange that still has one."""
    open_exchanges = list(exchanges)
    while open_exchanges:
        works = [(exchange, next(exchange, None)) for exchange in open_exchanges]
        open_exchanges = [exchange for exchange, work in works if work is not None]
        issued = [work for _, work in works if work is not None]
        if issued:
            yield issued[0] if len(issued) == 1 else AllWork(issued)


class Group(Protocol):
    """The ranks an architecture averages over, as a compressor sees them."""

    @property
    def size(self) -> int:
        """Number of ranks that contribute."""
        ...

    @property
    def rank(self) -> int:
        """This rank's number among them."""
        ...

    def sum(self, tensors: tuple[torch.Tensor, ...]) -> Work:
        """Start replacing each tensor by its sum over the group."""
        ...

    def summed(self, tensors: tuple[torch.Tensor, ...]) -> Exchange:
        """Replace each tensor by its sum over the group, in one round or in two."""
        ...

    def gather(self, tensor: torch.Tensor) -> tuple[Work, torch.Tensor]:
        """Start collecting `tensor` of every rank; the second value has one row per rank once the work is done."""
        ...

    def scatter(self, rows: torch.Tensor) -> tuple[Work, torch.Tensor]:
        """Start sending row r to rank r; the second value has the row each rank sent here once the work is done."""
        ...

    def scatter_uneven(
        self, messages: Sequence[torch.Tensor], lengths: Sequence[int]
    ) -> tuple[Work, list[torch.Tensor]]:
        """Start sending message r, of any length, to rank r; the second value has the message of each rank to this one.

        lengths: how many bytes each rank sends here.
        """
        ...

    def swap(self, send: torch.Tensor | None, receive: torch.Tensor | None, peer: int) -> Work:
        """Start sending one tensor to `peer` and filling another from it; either may be missing."""
        ...
