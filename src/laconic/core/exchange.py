"""The contract between WHAT is sent and WITH WHOM: a compressor asks a Group for sums or gathers, in rounds.

An exchange is a generator that yields the Work of each round it has issued and is resumed when that round is done,
so one thread can keep many exchanges in flight and every rank issues them in the same order.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from laconic.core.moment import Moment
from laconic.core.transport import AllWork, Transport, Work

RoundKind = Literal["sum", "gather", "scatter", "send"]
"""sum: everyone gets the sum of all. gather: everyone gets everything. scatter: of n rows, row r goes to rank r. send:
these bytes go to one other rank."""


@dataclass(frozen=True)
class Round:
    """One round of an exchange as data: what every rank contributes, and how the contributions meet."""

    kind: RoundKind
    sizes: tuple[int, ...]
    """Bytes of each tensor a rank contributes."""


MoveKind = Literal["sum", "scatter_sum", "gather", "scatter", "send", "to_leaders", "from_leaders", "serve", "mix"]
"""What all ranks do at the same time: the kinds of a round, and

scatter_sum: each rank gets its share of the sum. to_leaders, from_leaders: one rank of each host gets the sum of its
host, and hands the result out. serve: a server gets these bytes of every rank and answers each. mix: every rank sends
these bytes to each of its neighbours."""


@dataclass(frozen=True)
class Move:
    """One operation on the network as data, of which an exchange makes one after the other; what a simulator prices."""

    kind: MoveKind
    sizes: tuple[int, ...]
    """Bytes of each tensor a rank contributes."""
    algorithm: str = "native"
    """How a sum is formed, or one half of it."""
    peers: int = 1
    """Neighbours a rank sends to."""
    topology: str = ""
    """The name of the graph that says who these are."""
    answer_bytes: int = 0
    """What a server answers each rank."""
    among_hosts: bool = False
    """Only one rank of each host takes part."""
    server: int = -1
    """The server that adds up, where that is known; -1: any of them."""

    @property
    def nbytes(self) -> int:
        """What a rank contributes."""
        return sum(self.sizes)


Exchange = Generator[Work, None, None]


class Answer(Work, Protocol):
    """A request to a server."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What the server has answered, once the work is done, on the device of what was sent."""
        ...


class Servers(Protocol):
    """Processes beside the workers that form sums, as an architecture sees them."""

    def reduce(
        self, bucket: int, tensors: tuple[torch.Tensor, ...], *, decoded: bool, moment: Moment, what: str
    ) -> Answer:
        """Start sending this rank's tensors to the server of `bucket`, which answers when those of all ranks are there.

        decoded: the server decodes what each rank has sent, adds that up and answers with an encoded sum; else it adds
        up the tensors as they are.
        """
        ...


@dataclass(frozen=True)
class Wire:
    """What one exchange travels over."""

    transport: Transport
    what: str
    """In words, for whoever waits for it."""
    bucket: int = 0
    """The number of the bucket in the plan."""
    servers: Servers | None = None
    """Where the architecture has any."""
    halves: bool = False
    """Sums are formed in two rounds: every rank gets its share of the sum, then all get all."""


def one_round(work: Work) -> Exchange:
    """An exchange that consists of one operation already started."""
    yield work


def in_lockstep(*exchanges: Exchange) -> Exchange:
    """Several exchanges as one: each wait is for one round of all that still have one."""
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
        """This rank's place among them."""
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

    def swap(self, send: torch.Tensor | None, receive: torch.Tensor | None, peer: int) -> Work:
        """Start sending one tensor to `peer` and filling another from it; either may be missing."""
        ...
