"""An exchange as the communication thread sees it: what is issued at a time, and what is computed in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from laconic.collectives import ALGORITHMS
from laconic.collectives.choice import NATIVE
from laconic.core.exchange import Move
from laconic.core.plan import Bucket
from laconic.simulator.lowering.task_graph import Inputs

_INSIDE = {"to_leaders", "from_leaders"}
"""Moves of values that are not compressed."""


@dataclass(frozen=True)
class Turn:
    """What is issued at one time; the thread comes back when it is the oldest that is open, and all of it has ended."""

    moves: tuple[Move, ...]
    portion: float = 1.0
    """How much of the moves."""
    before_s: float = 0.0
    """What is computed before they are issued."""
    after_s: float = 0.0
    """What is computed with their outcome."""


def turns_of_all(inputs: Inputs, buckets: Sequence[Bucket], *, halves: bool = False) -> list[tuple[Turn, ...]]:
    """The turns of one exchange of each bucket."""
    owners = inputs.owners(buckets)
    return [
        turns_of(inputs, bucket, halves=halves, server=server) for bucket, server in zip(buckets, owners, strict=True)
    ]


def turns_of(inputs: Inputs, bucket: Bucket, *, halves: bool = False, server: int = -1) -> tuple[Turn, ...]:
    """The turns of one exchange of `bucket`; with `halves`, all but the first may wait."""
    if not inputs.exchanges():
        return ()
    strategy = inputs.strategy
    moves = strategy.architecture.moves(bucket, strategy.codec, inputs.moment, halves=halves)
    moves = tuple(replace(move, server=server) if move.kind == "serve" else move for move in moves)
    groups = _grouped(inputs, bucket, moves)
    if halves and len(groups) == 1:
        groups.append(())  # what a server answers is taken later
    turns = _with_codec(inputs, bucket, groups)
    first_share = 0.0 if halves else _first_step(inputs, turns[0].moves if turns else ())
    if not first_share:
        return turns
    # A sum of our own goes on step by step, whenever the thread comes back to it: first with one step, then the others.
    begin = Turn(turns[0].moves, first_share, turns[0].before_s)
    return begin, Turn(turns[0].moves, 1 - first_share, after_s=turns[0].after_s), *turns[1:]


def _grouped(inputs: Inputs, bucket: Bucket, moves: tuple[Move, ...]) -> list[tuple[Move, ...]]:
    """The moves that are issued together: where there are more of them than waits, it is the first ones."""
    if not moves or any(move.among_hosts for move in moves):
        return [(move,) for move in moves]
    waits = inputs.strategy.codec.num_waits(bucket, inputs.moment)
    kind = moves[0].kind
    if kind == "scatter_sum":
        return [tuple(move for move in moves if (move.kind == kind) is first) for first in (True, False)]
    if kind == "send":
        # Rank 0 only takes in what others begin with where there are more ranks than pairs.
        moves = (moves[0],) * (waits - len(moves)) + moves
    together = 1 + max(0, len(moves) - waits)
    return [moves[:together], *((move,) for move in moves[together:])]


def _first_step(inputs: Inputs, moves: tuple[Move, ...]) -> float:
    """The share of its first step in a sum that is formed step by step; 0 if there is none."""
    algorithm = next((move.algorithm for move in moves if move.kind == "sum"), NATIVE)
    if algorithm == NATIVE:
        return 0.0
    most = max(map(len, inputs.hosts), default=1)
    steps = ALGORITHMS[algorithm].cost(inputs.world_size, most).num_steps
    return 1 / steps if steps > 1 else 0.0


def _with_codec(inputs: Inputs, bucket: Bucket, groups: Sequence[tuple[Move, ...]]) -> tuple[Turn, ...]:
    """What encoding and decoding take, in the turns in which they happen."""
    codec = inputs.codec
    coded = [number for number, moves in enumerate(groups) if not any(move.kind in _INSIDE for move in moves)]
    if codec is None or not coded:
        return tuple(Turn(moves) for moves in groups)
    encode_s, decode_s = codec.encode_s(bucket.nbytes), codec.decode_s(bucket.nbytes)
    issuing = coded[:1]
    if not inputs.strategy.codec.traits.decodes_alone:
        # Rounds that depend on each other: something is encoded for each.
        issuing = [number for number in coded if groups[number]]
    kinds = {move.kind for moves in groups for move in moves}
    found: list[Turn] = []
    for number, moves in enumerate(groups):
        before_s, after_s = (encode_s / len(issuing) if number in issuing else 0.0), 0.0
        scatter = next((move for move in moves if move.kind == "scatter"), None)
        if scatter is not None:
            # A share of everybody's payload, which makes one; its sum is encoded again.
            after_s = decode_s + codec.encode_s(bucket.nbytes / _num_ranks(inputs, scatter))
        elif number == coded[-1]:
            # What is gathered is a payload of each rank, if it is not the shares of one.
            whole = not kinds & {"scatter", "scatter_sum"}
            after_s = decode_s * max((_num_payloads(inputs, move, whole=whole) for move in moves), default=1)
        found.append(Turn(moves, before_s=before_s, after_s=after_s))
    return tuple(found)


def _num_payloads(inputs: Inputs, move: Move, *, whole: bool) -> int:
    """How many a rank decodes after a move."""
    if move.kind == "mix":
        return 1 + move.peers  # its own, too
    return _num_ranks(inputs, move) if move.kind == "gather" and whole else 1


def _num_ranks(inputs: Inputs, move: Move) -> int:
    return len(inputs.hosts) if move.among_hosts else inputs.world_size
