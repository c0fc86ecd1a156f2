"""The communication thread on a virtual clock: it issues exchanges in the order in which the runtime's does.

    start the next exchange while fewer than WINDOW are open and the last one of the step has not come yet;
    otherwise wait for the oldest open one, go on with it, and put it at the end if it has another turn.

What a thread does next depends only on what came before, never on what happens to end first: so the order can be drawn.
An exchange in its last turn, whose outcome is only to be decoded, is finished after the next one has been started, if
it has arrived by then, but keeps its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from laconic.simulator.lowering.task_graph import Kind, TaskGraph, Which
from laconic.simulator.lowering.turns import Turn

WINDOW = 8
"""Exchanges the runtime has open at a time."""


@dataclass(eq=False)
class BucketExchange:
    """One exchange of one bucket, as far as it has been drawn."""

    which: Which
    turns: Sequence[Turn]
    nbytes: int = 0
    """How much is under way while it is open, where that is limited."""
    credit_bytes: int = 0
    """Bytes that may be under way when the next one starts; 0: as many exchanges as usual."""
    halves: bool = False
    """After its first turn it waits until it is carried on."""
    held_by: Sequence[int] = ()
    """What a server waits for before it answers."""
    done: list[list[int]] = field(default_factory=list)
    """For each class what ends with the outcome being there, once it has been drawn."""
    arrived: list[int] = field(default_factory=list)
    """What ends with a server having got everything."""
    turn: int = 0
    ends: list[int] = field(default_factory=list)
    """Of the turn that is under way."""
    is_aside: bool = False
    is_carried_on: bool = False


class CommunicationThread:
    """Of all ranks of some classes, which issue the same in the same order; or of one class that goes `alone`."""

    def __init__(self, drawing: TaskGraph, classes: Sequence[int], *, alone: bool = False) -> None:
        self._drawing = drawing
        self._classes = classes
        self._alone = classes[0] if alone else None
        self._free: list[list[int]] = [[] for _ in classes]
        """For each class what must end for its thread to have done all so far."""
        self._running: deque[BucketExchange] = deque()
        self._last_came = True

    def submit(self, exchange: BucketExchange, ready: Sequence[Sequence[int]], *, last: bool) -> None:
        """Start an exchange when its bucket is ready, for each class; `last`: nothing more belongs to this step."""
        self._make_room()
        turn = exchange.turns[0] if exchange.turns else Turn(())
        self._compute("encode", exchange, turn.before_s, ready)
        self._finish_early()
        if exchange.turns:
            self._issue(exchange)
            self._running.append(exchange)
        else:
            exchange.done = [list(free) for free in self._free]
        self._came(last=last)

    def carry_on(self, exchange: BucketExchange, *, last: bool) -> None:
        """Issue the second half of an exchange."""
        self._make_room()
        while exchange.turns and not exchange.is_aside:
            self._go_on_with_oldest()
        exchange.is_carried_on = True
        if exchange.turns:
            exchange.turn += 1
            self._issue(exchange)
            self._running.append(exchange)
        self._came(last=last)

    def _make_room(self) -> None:
        while self._running and (self._last_came or not self._may_start()):
            self._go_on_with_oldest()

    def _may_start(self) -> bool:
        credit_bytes = self._running[-1].credit_bytes
        if credit_bytes:
            return sum(exchange.nbytes for exchange in self._running) < credit_bytes
        return len(self._running) < WINDOW

    def _came(self, *, last: bool) -> None:
        self._last_came = last
        while last and self._running:
            self._go_on_with_oldest()

    def _go_on_with_oldest(self) -> None:
        exchange = self._running.popleft()
        if exchange.halves and not exchange.is_carried_on:
            if exchange.turns[1].moves:  # else it is a server's answer, which is not waited for yet
                self._compute("decode", exchange, 0.0, [exchange.ends] * len(self._classes))
            exchange.is_aside = True
            return
        if exchange.done:  # early
            self._free = [[*free, *done] for free, done in zip(self._free, exchange.done, strict=True)]
            return
        turn, following = exchange.turns[exchange.turn], exchange.turns[exchange.turn + 1 :]
        between_s = turn.after_s + (following[0].before_s if following else 0.0)
        self._compute("decode", exchange, between_s, [exchange.ends] * len(self._classes))
        if following:
            exchange.turn += 1
            self._issue(exchange)
            self._running.append(exchange)
        else:
            exchange.done = [list(free) for free in self._free]

    def _compute(self, kind: Kind, exchange: BucketExchange, time_s: float, after: Sequence[Sequence[int]]) -> None:
        """The thread of each class computes, after what it has done so far and after this."""
        self._free = [
            self._drawing.code(kind, exchange.which, number, time_s, [*free, *tasks])
            for number, free, tasks in zip(self._classes, self._free, after, strict=True)
        ]

    def _issue(self, exchange: BucketExchange) -> None:
        drawing, turn = self._drawing, exchange.turns[exchange.turn]
        drawing.next_in_order()
        issued = list(dict.fromkeys(task for free in self._free for task in free))
        if turn.moves:
            exchange.ends, exchange.arrived = [], []
        for move in turn.moves:
            moved = drawing.move(
                exchange.which, move, issued, portion=turn.portion, alone=self._alone, held_by=exchange.held_by
            )
            exchange.ends += moved.ends
            exchange.arrived += moved.arrived

    def _finish_early(self) -> None:
        """Decode what has arrived, now that another one has been started."""
        for exchange in self._running:
            if exchange.halves or exchange.done or exchange.turn < len(exchange.turns) - 1:
                continue
            after_s = exchange.turns[-1].after_s
            exchange.done = [
                self._drawing.code("decode", exchange.which, number, after_s, [*exchange.ends, *free])
                for number, free in zip(self._classes, self._free, strict=True)
            ]
