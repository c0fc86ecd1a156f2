"""How tensors move between ranks, and the one place where bytes are counted.

Bytes that a rank sends are counted. For n ranks and N bytes per rank:

    all_reduce      2 (n-1)/n N        reduce_scatter   (n-1)/n N       all_to_all   (n-1)/n N
    all_gather      (n-1) N            broadcast        N per child in a binomial tree
    send_receive    the bytes of the sends

These are the bytes of ring, pairwise and tree algorithms, without the headers of lower layers.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from laconic.core.hosts import Hosts
from laconic.errors import CommunicationError

if TYPE_CHECKING:
    from laconic.core.paced import PacedLink

Purpose = Literal["payload", "buffers", "control"]
"""payload: gradients, parameters and their encoded forms; buffers: module buffers; control: agreement among ranks."""

ReduceOp = Literal["sum", "max", "min"]

DETACHING, DETACHED = "detaching", "detached"
"""The status of a rank that has begun to detach and will join no other operation, and of one that has done so."""


def will_not_come(what: str, rank: int, status: str, advice: str) -> str:
    """The reason why a rank that is in `what` gives up: another one is in a different operation."""
    where = "has detached" if status in (DETACHING, DETACHED) else f'is in "{status}"'
    return f"is in {what}, while rank {rank} {where}. {advice.rstrip('.')}"


class Traffic:
    """Bytes this rank has sent, by purpose and by operation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: Counter[tuple[Purpose, str]] = Counter()
        self.total_bytes = 0
        """All bytes sent so far."""

    def count(self, purpose: Purpose, operation: str, nbytes: int) -> None:
        """Add to the count; called by transports only."""
        with self._lock:
            self._sent[purpose, operation] += nbytes
            self.total_bytes += nbytes

    def sent_bytes(self, purpose: Purpose | None = None) -> int:
        """Bytes sent so far, for one purpose or for all."""
        with self._lock:
            return sum(value for (kind, _), value in self._sent.items() if purpose in (None, kind))

    def by_operation(self) -> dict[str, int]:
        """Bytes sent so far, keyed "purpose/operation"."""
        with self._lock:
            return {f"{purpose}/{operation}": value for (purpose, operation), value in sorted(self._sent.items())}


class Work(Protocol):
    """An operation that has been started."""

    def wait(self) -> None:
        """Return when the result may be used; raise CommunicationError if it failed or took too long.

        On a GPU "may be used" means on the current stream: the host does not wait.
        """
        ...

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...


class Transport(Protocol):
    """A fixed set of ranks that exchange tensors.

    Every rank calls the same operations in the same order, from one thread. Operations start at once and work in
    place where the signature says nothing else; tensors must stay untouched until the work is done.
    """

    @property
    def rank(self) -> int:
        """This rank, 0 <= rank < world_size."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def traffic(self) -> Traffic:
        """The byte count of this rank."""
        ...

    @property
    def description(self) -> str:
        """The transport in words."""
        ...

    @property
    def hosts(self) -> Hosts:
        """Which ranks share a host; the same on every rank."""
        ...

    @property
    def link(self) -> PacedLink | None:
        """The simulated link that paces this rank; None: there is none.

        Connections of this rank to servers and neighbours are paced by it too.
        """
        ...

    @property
    def control_device(self) -> torch.device:
        """The device that small tensors must be on for this transport."""
        ...

    @property
    def timeout_s(self) -> float:
        """How long a wait for other ranks may take."""
        ...

    @property
    def in_process(self) -> bool:
        """Whether all ranks are threads of one process."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether this rank can still reach the others: False once the process group has been destroyed."""
        ...

    def waits_on_stream(self, device: torch.device) -> bool:
        """Whether a wait for an operation on tensors of this device makes the current stream wait, not the host."""
        ...

    def all_reduce(
        self, tensor: torch.Tensor, *, op: ReduceOp = "sum", purpose: Purpose = "payload", what: str = ""
    ) -> Work:
        """Replace `tensor` by its sum (max, min) over all ranks."""
        ...

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, purpose: Purpose = "payload", what: str = "") -> Work:
        """Replace `tensor` by the source's."""
        ...

    def all_gather(
        self, output: torch.Tensor, tensor: torch.Tensor, *, purpose: Purpose = "payload", what: str = ""
    ) -> Work:
        """Fill row r of `output` with rank r's `tensor`."""
        ...

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, *, purpose: Purpose = "payload", what: str = ""
    ) -> Work:
        """Fill `output` with row `rank` of the sum of everyone's `tensor`."""
        ...

    def all_to_all(
        self, output: torch.Tensor, tensor: torch.Tensor, *, purpose: Purpose = "payload", what: str = ""
    ) -> Work:
        """Fill row r of `output` with row `rank` of rank r's `tensor`."""
        ...

    def send_receive(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
        *,
        purpose: Purpose = "payload",
        what: str = "",
    ) -> Work:
        """Send each (peer, tensor) and fill each (peer, tensor); pairs match in the order given per peer."""
        ...

    def tally(self, name: str, amount: int) -> int:
        """Add to a counter that all ranks share, 0 at first, and return its value; waits for no other rank.

        When it returns, every rank that asks finds the sum. Any thread may call it.
        """
        ...

    def drop_tally(self, name: str) -> None:
        """Forget a counter that no rank will ask for again."""
        ...

    def acquire(self) -> None:
        """Reserve the transport for one session; raise AttachError if another has it."""
        ...

    def release(self) -> None:
        """End the reservation."""
        ...

    def set_status(self, status: str, *, exchange: int | None = None) -> None:
        """Set the status of this rank, for the error message of a rank that waits for it.

        exchange: the number of the exchange it begins, counted equally on every rank.
        """
        ...

    def compare_steps(self, passes: int, step: int, *, last: bool = False) -> None:
        """Compare with the other ranks the steps made in as many backward passes that exchange gradients.

        If ranks differ, `known_failure()` soon says so. last: this rank makes no more; raise it here, if another rank
        has come as far.
        """
        ...

    def gather_texts(self, text: str, *, what: str, exchange: int, advice: str) -> list[str]:
        """The text of every rank, sent apart from tensors, so that it cannot collide with an exchange.

        Raises as soon as another rank has begun an exchange numbered above `exchange`, or has detached, because it will
        not take part. what: the operation of this rank, in words. advice: what the user should do, as sentences.
        """
        ...

    def wait_for(self, event: threading.Event, what: str, *, heard_s: Callable[[], float]) -> None:
        """Return when `event` is set; raise, naming the rank to blame, after `timeout_s` without a message.

        For waits outside the transport's operations. heard_s: the time of the last message from other ranks, by
        time.monotonic().
        """
        ...

    def waiting_until(self, deadline_s: float) -> AbstractContextManager[None]:
        """Inside, this rank waits for others outside the transport's operations, until a deadline by time.monotonic().

        Shortly before the deadline it begins to watch them, so that it then knows which rank has stopped answering.
        """
        ...

    def silent_rank(self, operation: str) -> int | None:
        """The rank that has stopped answering, if one has, found out within seconds; PeerLost if one has failed."""
        ...

    def known_failure(self) -> CommunicationError | None:
        """A failure that is already known here, without communication."""
        ...

    def raise_if_peer_failed(self) -> None:
        """Raise PeerLost if a rank is known to have failed."""
        ...

    def announce_failure(self, reason: str, *, rank: int | None = None) -> None:
        """Announce to the other ranks that this one, or another `rank`, has failed, so that none waits for it."""
        ...

    def close(self) -> None:
        """Release all resources; closing twice is fine."""
        ...


def left_out(passes: int, behind: int, fewest: int, ahead: int, most: int) -> str:
    """What rank `behind` has done, as the reason of a failure."""
    return (
        f"has made {fewest} steps in {passes} backward passes that exchanged gradients, and rank {ahead} has made "
        f"{most}: a step was left out on one rank alone, so replicas differ. Skip a step on all ranks or on none, e.g. "
        "where the gradients after backward(), which are the same on all ranks, are not finite"
    )


class DoneWork:
    """Work that is already done: one rank, or nothing to send."""

    def wait(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Always."""
        return True


class AllWork:
    """Several operations as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = works

    def wait(self) -> None:
        """Wait for each in turn."""
        for work in self.works:
            work.wait()

    def done(self) -> bool:
        """Whether all are done."""
        return all(work.done() for work in self.works)
