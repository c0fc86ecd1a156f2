"""The order in which exchanges are issued: one pure object that the runtime executes and the simulator follows.

The next action depends only on what was submitted and on how many rounds each exchange has, never on which network
operation happens to finish first. So every rank issues the same operations in the same order, and a simulator can
follow that order without running anything.

    start the next exchange while fewer than WINDOW are open and the last one of the step has not been submitted;
    otherwise wait for the oldest open exchange, resume it, and queue it again if it has issued another round.

A decoupled exchange is parked after its first round, until its second half is submitted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

WINDOW = 8
"""Maximum number of open exchanges: enough to hide start-up costs, few enough to bound the memory of payloads."""


class Ordered(Protocol):
    """The properties of an exchange that the order depends on."""

    @property
    def nbytes(self) -> int:
        """Its bytes in flight until it is finished, where those are limited."""
        ...

    @property
    def credit_bytes(self) -> int:
        """Bytes that may be in flight when the next exchange starts; 0: WINDOW exchanges, whatever their size."""
        ...

    @property
    def decoupled(self) -> bool:
        """Whether it is parked after its first round until its second half is submitted."""
        ...


E = TypeVar("E", bound=Ordered)

Kind = Literal["start", "resume", "park", "second_half"]
"""start: issue the first round. resume: wait for the round in flight, then issue the next one or finish. park: wait for
the first round of a decoupled exchange. second_half: issue the second half of a parked exchange."""


@dataclass(frozen=True)
class Action(Generic[E]):
    """The next action."""

    kind: Kind
    exchange: E


@dataclass(frozen=True)
class _Submitted(Generic[E]):
    exchange: E
    last: bool
    second_half: bool


class ExchangeOrder(Generic[E]):
    """Which exchange is started or resumed next.

    The caller executes an action of `next` and reports its result, `issued` or `finished`, before asking again; a
    parked exchange needs no report. An exchange whose remaining work is local may be reported as finished at any time:
    it keeps its place, so that the number of open exchanges does not depend on the network's timing.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Submitted[E]] = deque()
        self._open: deque[E] = deque()
        self._parked: set[int] = set()
        self._second_half: set[int] = set()
        self._unfinished: dict[int, E] = {}
        self._last_submitted = True

    def submit(self, exchange: E, *, last: bool) -> None:
        """Queue an exchange; `last`: nothing more belongs to this step, so open exchanges are completed."""
        self._unfinished[id(exchange)] = exchange
        self._waiting.append(_Submitted(exchange, last, second_half=False))

    def submit_second_half(self, exchange: E, *, last: bool) -> None:
        """Queue the second half of an exchange that was submitted before."""
        self._waiting.append(_Submitted(exchange, last, second_half=True))

    def next(self) -> Action[E] | None:
        """The next action, or None if that depends on what is submitted next."""
        while True:
            if self._open and (self._last_submitted or not self._may_start()):
                action = self._oldest()
                if action is not None:
                    return action
                continue
            if not self._waiting:
                return None
            submitted = self._waiting[0]
            if submitted.second_half and self._is_ahead(submitted.exchange):
                # Exchanges before it are only waited for: their next rounds are submitted by themselves.
                action = self._oldest()
                if action is not None:
                    return action
                continue
            self._waiting.popleft()
            self._last_submitted = submitted.last
            if not submitted.second_half:
                return Action("start", submitted.exchange)
            if id(submitted.exchange) in self._unfinished:
                self._parked.discard(id(submitted.exchange))
                self._second_half.add(id(submitted.exchange))
                return Action("second_half", submitted.exchange)

    def _is_ahead(self, exchange: E) -> bool:
        """Whether an exchange has started but its first half has not been waited for."""
        return id(exchange) in self._unfinished and id(exchange) not in self._parked

    def _may_start(self) -> bool:
        credit_bytes = self._open[-1].credit_bytes
        if credit_bytes:
            return sum(exchange.nbytes for exchange in self._open) < credit_bytes
        return len(self._open) < WINDOW

    def _oldest(self) -> Action[E] | None:
        exchange = self._open.popleft()
        if id(exchange) not in self._unfinished:
            return None
        if exchange.decoupled and id(exchange) not in self._second_half:
            self._parked.add(id(exchange))
            return Action("park", exchange)
        return Action("resume", exchange)

    def issued(self, exchange: E) -> None:
        """Another round of this exchange is in flight."""
        self._open.append(exchange)

    def finished(self, exchange: E) -> None:
        """This exchange is finished."""
        self._unfinished.pop(id(exchange), None)
        self._second_half.discard(id(exchange))

    def in_last_part(self, exchange: E) -> bool:
        """Whether no further submission is needed to finish this exchange."""
        return not exchange.decoupled or id(exchange) in self._second_half

    def open(self) -> list[E]:
        """Exchanges with a round in flight, oldest first."""
        return [exchange for exchange in self._open if id(exchange) in self._unfinished]

    def unfinished(self) -> list[E]:
        """Every exchange that was submitted and has not finished, in whatever state."""
        return list(self._unfinished.values())
