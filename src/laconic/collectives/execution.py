"""Runs a collective over a transport's send and receive, step by step.

Sums are formed in place, in the tensor's dtype. One step is one wait, so exchanges of several buckets can take turns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from laconic.collectives.schedule import Collective, Turn, chunk_bounds, program
from laconic.core.exchange import Exchange, in_lockstep, one_round
from laconic.core.transport import AllWork, DoneWork, Purpose, Transport, Work


def run(
    collective: Collective,
    transport: Transport,
    tensors: Sequence[torch.Tensor],
    *,
    what: str,
    purpose: Purpose = "payload",
    members: Sequence[int] | None = None,
) -> Exchange:
    """Replace each tensor by its sum over the ranks; yields once per step, whatever this rank does in it.

    members: the ranks that take part, in the order the collective numbers them; all of the transport if left out.
    """
    ranks = range(transport.world_size) if members is None else members
    assert collective.world_size == len(ranks), "a collective is made for one number of ranks"
    turns = program(collective, ranks.index(transport.rank))
    parts = [_Part(tensor, collective, turns) for tensor in tensors]
    for turn in turns:
        sends = [
            (ranks[message.peer], piece)
            for message in turn.sends
            for part in parts
            if (piece := part.piece(message.first, message.stop)).numel()
        ]
        receives: list[tuple[int, torch.Tensor]] = []
        sums: list[tuple[torch.Tensor, torch.Tensor]] = []
        used = [0] * len(parts)
        for message in turn.receives:
            for number, part in enumerate(parts):
                piece = part.piece(message.first, message.stop)
                if not piece.numel():
                    continue
                if message.reduce:
                    arrived = part.spare[used[number] : used[number] + piece.numel()]
                    used[number] += piece.numel()
                    sums.append((piece, arrived))
                    piece = arrived
                receives.append((ranks[message.peer], piece))
        yield transport.send_receive(sends, receives, purpose=purpose, what=what) if sends or receives else DoneWork()
        for piece, arrived in sums:
            piece += arrived


class _Part:
    """One tensor in chunks, and a buffer for received chunks that are added to it."""

    def __init__(self, tensor: torch.Tensor, collective: Collective, turns: Sequence[Turn]) -> None:
        self._flat = tensor.view(-1)
        size = tensor.dtype.itemsize
        self._bounds = [bound // size for bound in chunk_bounds(tensor.nbytes, collective.num_chunks)]
        most = max((sum(self._numel(m.first, m.stop) for m in turn.receives if m.reduce) for turn in turns), default=0)
        self.spare = torch.empty(most, dtype=tensor.dtype, device=tensor.device)

    def _numel(self, first: int, stop: int) -> int:
        return self._bounds[stop] - self._bounds[first]

    def piece(self, first: int, stop: int) -> torch.Tensor:
        """The chunks first <= chunk < stop."""
        return self._flat[self._bounds[first] : self._bounds[stop]]


class WholeExchange:
    """An exchange as one Work: waiting carries out its remaining steps.

    A caller that can wait step by step uses `steps` instead, so that other exchanges proceed in between.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._work = next(exchange, None)

    def wait(self) -> None:
        """Carry out every remaining step."""
        for work in self.steps():
            work.wait()

    def done(self) -> bool:
        """Whether all steps have been carried out: a step that has not been issued is never done by itself."""
        return self._work is None

    def steps(self) -> Exchange:
        """The remaining steps of the exchange one by one, at least one."""
        if self._work is None:
            yield DoneWork()
        while self._work is not None:
            yield self._work
            self._work = next(self._exchange, None)


def step_by_step(work: Work) -> Exchange:
    """An operation with a wait for each of its steps, where it has any."""
    if isinstance(work, WholeExchange):
        return work.steps()
    if isinstance(work, AllWork) and any(isinstance(part, WholeExchange) for part in work.works):
        return in_lockstep(*map(step_by_step, work.works))
    return one_round(work)


def unrolled(exchange: Exchange, num_waits: int) -> Exchange:
    """An exchange with a wait for each step of each of its rounds, and idle waits at its end up to `num_waits`."""
    waited = 0
    for work in exchange:
        for step in step_by_step(work):
            waited += 1
            yield step
    assert waited <= num_waits, f"an exchange waits {waited} times and was expected to {num_waits} times"
    yield from idle(num_waits - waited)


def idle(num_waits: int) -> Exchange:
    """An exchange that only lets others proceed."""
    for _ in range(num_waits):
        yield DoneWork()
