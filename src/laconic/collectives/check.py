"""Proves that a collective is an all-reduce and cannot hang, or says at which step, rank and chunk it is not.

The proof follows which contributions every rank holds in every chunk, and shows that:

- in every step, a rank does not send a chunk that it also receives, and a chunk that replaces its own comes from one
  rank only;
- nothing is added twice, and every rank ends with every contribution to every chunk exactly once;
- the final sum of a chunk is formed on one rank and copied from there, so replicas end with the same bits;
- the programs that ranks execute (`program`) have a receive for every send, in the same order at both ends, and come
  to their end even if no send returns before its receive has been posted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from laconic.collectives.schedule import Collective, Message, Table, Turn, program
from laconic.errors import LaconicError


class BrokenCollective(LaconicError):
    """Rows that are not an all-reduce, or that could hang."""


def check(collective: Collective) -> None:
    """Raise BrokenCollective unless this is an all-reduce that cannot hang."""
    _check_range(collective)
    _check_sums(collective)
    check_programs([program(collective, rank) for rank in range(collective.world_size)], collective.algorithm)


def _refuse(name: str, rows: Table, faulty: npt.NDArray[np.bool_], reason: str) -> None:
    """Raise, naming the first faulty row, if there is one."""
    if faulty.any():
        step, source, destination, chunk, _ = rows[faulty][0].tolist()
        raise BrokenCollective(
            f"{name}: step {step}, chunk {chunk} from rank {source} to rank {destination}: {reason}."
        )


def _check_range(collective: Collective) -> None:
    name, rows = collective.algorithm, collective.table
    step, source, destination, chunk, _ = rows.T
    ranks = rows[:, 1:3]
    outside = ((ranks < 0) | (ranks >= collective.world_size)).any(axis=1) | (step < 0)
    _refuse(name, rows, outside, f"there are {collective.world_size} ranks, and steps begin at 0")
    _refuse(name, rows, (chunk < 0) | (chunk >= collective.num_chunks), f"there are {collective.num_chunks} chunks")
    _refuse(name, rows, source == destination, "a rank sends nothing to itself")


def _check_sums(collective: Collective) -> None:
    """Follow contributions: held[r, c, i] is the number of times that rank r has rank i's contribution to chunk c."""
    name, size, chunks = collective.algorithm, collective.world_size, collective.num_chunks
    held = np.zeros((size, chunks, size), dtype=np.int16)
    held[range(size), :, range(size)] = 1
    # Where the value a rank has in a chunk was formed: the step and the rank that added last.
    formed = np.empty((size, chunks, 2), dtype=np.int32)
    formed[:, :, 0], formed[:, :, 1] = -1, np.arange(size)[:, None]
    last_written = np.full((size, chunks), -1)
    boundaries = np.flatnonzero(np.diff(collective.table[:, 0])) + 1
    for rows in np.split(collective.table, boundaries) if len(collective.table) else ():
        _check_step(name, rows, chunks)
        step, source, destination, chunk, reduce = rows.T
        # Read before anything of this step is written, as rows of a step are defined.
        arriving, arriving_formed = held[source, chunk], formed[source, chunk]
        adds = reduce.astype(bool)
        np.add.at(held, (destination[adds], chunk[adds]), arriving[adds])
        formed[destination[adds], chunk[adds]] = np.stack([step[adds], destination[adds]], axis=1)
        held[destination[~adds], chunk[~adds]] = arriving[~adds]
        formed[destination[~adds], chunk[~adds]] = arriving_formed[~adds]
        last_written[destination, chunk] = step
        _refuse(name, rows, (held[destination, chunk] > 1).any(axis=1), "a contribution is added a second time")
    missing = np.argwhere(held != 1)
    if len(missing):
        rank, chunk, contributor = missing[0].tolist()
        last = last_written[rank, chunk]
        since = "which it never receives" if last < 0 else f"which it last receives in step {last}"
        raise BrokenCollective(
            f"{name}: rank {rank} ends without rank {contributor}'s contribution to chunk {chunk}, {since}."
        )
    apart = np.argwhere((formed != formed[0]).any(axis=2))
    if len(apart):
        rank, chunk = apart[0].tolist()
        raise BrokenCollective(
            f"{name}: the sum of chunk {chunk} is formed on rank {formed[0, chunk, 1]} in step {formed[0, chunk, 0]} "
            f"for rank 0 and on rank {formed[rank, chunk, 1]} in step {formed[rank, chunk, 0]} for rank {rank}; they "
            "may differ in their last bits."
        )


def _check_step(name: str, rows: Table, chunks: int) -> None:
    """The result of a step does not depend on the order of its rows."""
    _, source, destination, chunk, reduce = rows.astype(np.int64).T
    reads, writes = source * chunks + chunk, destination * chunks + chunk
    _, pair, times = np.unique(writes + reads * (writes.max() + 1), return_inverse=True, return_counts=True)
    _refuse(name, rows, times[pair] > 1, "this row occurs twice")
    _refuse(name, rows, np.isin(writes, reads), "the receiver sends this chunk itself in the same step")
    _, target, times = np.unique(writes, return_inverse=True, return_counts=True)
    _refuse(name, rows, (reduce == 0) & (times[target] > 1), "others write to it in the same step")


def check_programs(programs: Sequence[Sequence[Turn]], name: str = "programs") -> None:
    """Raise BrokenCollective unless all ranks come to the end of their turns.

    Each rank posts all sends and receives of a turn, and continues when all are done. The n-th send from a to b matches
    the n-th receive of b from a, and neither is done before both are posted: every transport promises at least this.
    """
    position = [0] * len(programs)
    posted: dict[tuple[int, int, bool], list[Message]] = {}
    ends: dict[int, list[tuple[tuple[int, int, bool], int]]] = {}
    waiting = set(range(len(programs)))

    def post(rank: int) -> None:
        """Post the next turn that is not empty, and record how many messages must be matched for it."""
        turns = programs[rank]
        while position[rank] < len(turns) and not (turns[position[rank]].sends or turns[position[rank]].receives):
            position[rank] += 1
        if position[rank] == len(turns):
            waiting.discard(rank)
            return
        turn, needs = turns[position[rank]], []
        for messages, sends in ((turn.sends, True), (turn.receives, False)):
            for message in messages:
                ours = (rank, message.peer, sends)
                queue = posted.setdefault(ours, [])
                queue.append(message)
                needs.append(((message.peer, rank, not sends), len(queue)))
                other = posted.get((message.peer, rank, not sends), [])
                if len(other) >= len(queue):
                    _check_match(name, rank, position[rank], message, other[len(queue) - 1])
        ends[rank] = needs

    for rank in range(len(programs)):
        post(rank)
    while waiting:
        ready = [rank for rank in waiting if all(len(posted.get(queue, ())) >= count for queue, count in ends[rank])]
        if not ready:
            rank = min(waiting, key=lambda rank: (position[rank], rank))
            (peer, _, is_send), _ = next(
                (queue, count) for queue, count in ends[rank] if len(posted.get(queue, ())) < count
            )
            verb = "receive from" if is_send else "send to"
            raise BrokenCollective(
                f"{name}: step {position[rank]}: rank {rank} waits for ever to {verb} rank {peer}, which never "
                "reaches that."
            )
        for rank in sorted(ready):
            position[rank] += 1
            post(rank)


def _check_match(name: str, rank: int, step: int, mine: Message, other: Message) -> None:
    if (mine.first, mine.stop, mine.reduce) != (other.first, other.stop, other.reduce):
        raise BrokenCollective(
            f"{name}: step {step}: what rank {rank} and rank {mine.peer} send each other does not match: chunks "
            f"{mine.first} to {mine.stop - 1} here, {other.first} to {other.stop - 1} there."
        )
