"""The communication thread on a virtual clock: it follows the same order of exchanges as the runtime's (core/order.py).

An exchange whose last round is in flight is decoded as soon as that round has arrived and the thread is idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from laconic.core.order import Action, ExchangeOrder
from laconic.simulator.lowering.phases import Phase
from laconic.simulator.lowering.task_graph import Kind, TaskGraph, Which


@dataclass(eq=False)
class BucketExchange:
    """One exchange of one bucket, as far as its tasks have been added."""

    which: Which
    phases: Sequence[Phase]
    nbytes: int = 0
    """Its bytes in flight until it is finished, where those are limited."""
    credit_bytes: int = 0
    """Bytes that may be in flight when the next exchange starts; 0: the number of exchanges is limited instead."""
    decoupled: bool = False
    """Whether it waits, after its first phase, until its second half is submitted."""
    held_by: Sequence[int] = ()
    """The tasks that a server waits for before it answers."""
    ready: Sequence[Sequence[int]] = ()
    """For each class, the tasks after which the bucket is complete."""
    done: list[list[int]] = field(default_factory=list)
    """For each class, the tasks after which the result is available, once they have been added."""
    arrived: list[int] = field(default_factory=list)
    """The tasks after which a server has received everything."""
    phase: int = 0
    ends: list[int] = field(default_factory=list)
    """The end of the phase in flight."""


class CommunicationThread:
    """The thread of all ranks of some classes, which issue operations in one order; or of one class, `alone`."""

    def __init__(self, task_graph: TaskGraph, classes: Sequence[int], *, alone: bool = False) -> None:
        self._task_graph = task_graph
        self._classes = classes
        self._alone = classes[0] if alone else None
        self._free: list[list[int]] = [[] for _ in classes]
        """For each class, the tasks after which its thread is idle."""
        self._order: ExchangeOrder[BucketExchange] = ExchangeOrder()

    def submit(self, exchange: BucketExchange, ready: Sequence[Sequence[int]], *, last: bool) -> None:
        """Start an exchange when its bucket is ready, for each class; `last`: it is the last of this step."""
        exchange.ready = ready
        self._order.submit(exchange, last=last)
        self._follow_order()

    def submit_second_half(self, exchange: BucketExchange, *, last: bool) -> None:
        """Issue the second half of an exchange."""
        self._order.submit_second_half(exchange, last=last)
        self._follow_order()

    def _follow_order(self) -> None:
        while (action := self._order.next()) is not None:
            self._draw(action)
        self._decode_arrived()

    def _draw(self, action: Action[BucketExchange]) -> None:
        exchange = action.exchange
        if action.kind == "start":
            phase = exchange.phases[0] if exchange.phases else Phase(())
            self._compute("encode", exchange, phase.before_s, exchange.ready)
            if exchange.phases:
                self._issue(exchange)
            else:
                self._finish(exchange)
        elif action.kind == "second_half":
            exchange.phase += 1
            self._issue(exchange)
        elif action.kind == "park":
            if exchange.phases[1].moves:  # else it is a server's answer, which is taken later
                self._compute("decode", exchange, 0.0, [exchange.ends] * len(self._classes))
        elif exchange.done:
            # It was decoded when it arrived; its turn in the order comes only now.
            self._free = [[*free, *done] for free, done in zip(self._free, exchange.done, strict=True)]
            self._order.finished(exchange)
        else:
            self._resume(exchange)

    def _resume(self, exchange: BucketExchange) -> None:
        phase, following = exchange.phases[exchange.phase], exchange.phases[exchange.phase + 1 :]
        between_s = phase.after_s + (following[0].before_s if following else 0.0)
        self._compute("decode", exchange, between_s, [exchange.ends] * len(self._classes))
        if following:
            exchange.phase += 1
            self._issue(exchange)
        else:
            self._finish(exchange)

    def _finish(self, exchange: BucketExchange) -> None:
        exchange.done = [list(free) for free in self._free]
        self._order.finished(exchange)

    def _compute(self, kind: Kind, exchange: BucketExchange, time_s: float, after: Sequence[Sequence[int]]) -> None:
        """The thread of each class computes, after its earlier work and after these tasks."""
        self._free = [
            self._task_graph.code(kind, exchange.which, number, time_s, [*free, *tasks])
            for number, free, tasks in zip(self._classes, self._free, after, strict=True)
        ]

    def _issue(self, exchange: BucketExchange) -> None:
        task_graph, phase = self._task_graph, exchange.phases[exchange.phase]
        task_graph.next_in_order()
        issued = list(dict.fromkeys(task for free in self._free for task in free))
        if phase.moves:
            exchange.ends, exchange.arrived = [], []
        for move in phase.moves:
            moved = task_graph.move(
                exchange.which, move, issued, portion=phase.portion, alone=self._alone, held_by=exchange.held_by
            )
            exchange.ends += moved.ends
            exchange.arrived += moved.arrived
        self._order.issued(exchange)

    def _decode_arrived(self) -> None:
        """While the thread waits for the next bucket, it decodes exchanges that arrive."""
        for exchange in self._order.open():
            if exchange.decoupled or exchange.done or exchange.phase < len(exchange.phases) - 1:
                continue
            after_s = exchange.phases[-1].after_s
            exchange.done = [
                self._task_graph.code("decode", exchange.which, number, after_s, [*exchange.ends, *free])
                for number, free in zip(self._classes, self._free, strict=True)
            ]
