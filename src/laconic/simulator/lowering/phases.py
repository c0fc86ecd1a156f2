"""An exchange as the communication thread sees it: moves that are issued together, and the computation in between."""

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
class Phase:
    """Moves that are issued together; when all have ended, the thread continues in the order of exchanges."""

    moves: tuple[Move, ...]
    portion: float = 1.0
    """The part of the moves that this phase makes."""
    before_s: float = 0.0
    """The computation before they are issued."""
    after_s: float = 0.0
    """The computation on their results."""


def phases_of_all(inputs: Inputs, buckets: Sequence[Bucket], *, decoupled: bool = False) -> list[tuple[Phase, ...]]:
    """The phases of one exchange of each bucket; equal buckets share them."""
    alike: dict[tuple[object, ...], tuple[Phase, ...]] = {}
    by_name, found = inputs.strategy.codec.traits.by_name, list[tuple[Phase, ...]]()
    for number, (bucket, server) in enumerate(zip(buckets, inputs.owners(buckets), strict=True)):
        key = (number,) if by_name else (bucket.layout, server)
        if key not in alike:
            alike[key] = phases_of(inputs, bucket, decoupled=decoupled, server=server)
        found.append(alike[key])
    return found


def phases_of(inputs: Inputs, bucket: Bucket, *, decoupled: bool = False, server: int = -1) -> tuple[Phase, ...]:
    """The phases of one exchange of `bucket`; if `decoupled`, all but the first may wait."""
    if not inputs.exchanges():
        return ()
    strategy = inputs.strategy
    moves = strategy.architecture.moves(bucket, strategy.codec, inputs.moment, decoupled=decoupled)
    moves = tuple(replace(move, server=server) if move.kind == "serve" else move for move in moves)
    groups = _grouped(inputs, bucket, moves)
    if decoupled and len(groups) == 1:
        groups.append(())  # the answer of a server is taken later
    phases = _with_codec(inputs, bucket, groups)
    first_share = 0.0 if decoupled else _first_step(inputs, phases[0].moves if phases else ())
    if not first_share:
        return phases
    # A sum with laconic's own algorithm proceeds step by step, whenever the thread returns to it: first one step, then
    # the others.
    begin = Phase(phases[0].moves, first_share, phases[0].before_s)
    return begin, Phase(phases[0].moves, 1 - first_share, after_s=phases[0].after_s), *phases[1:]


def _grouped(inputs: Inputs, bucket: Bucket, moves: tuple[Move, ...]) -> list[tuple[Move, ...]]:
    """Groups of moves that are issued together: if there are more moves than waits, the first moves are one group."""
    if not moves or any(move.among_hosts for move in moves):
        return [(move,) for move in moves]
    waits = inputs.strategy.codec.num_waits(bucket, inputs.moment)
    kind = moves[0].kind
    if kind == "scatter_sum":
        return [tuple(move for move in moves if (move.kind == kind) is first) for first in (True, False)]
    if kind == "send":
        # With an unpaired rank, rank 0 only receives in the first step.
        moves = (moves[0],) * (waits - len(moves)) + moves
    together = 1 + max(0, len(moves) - waits)
    return [moves[:together], *((move,) for move in moves[together:])]


def _first_step(inputs: Inputs, moves: tuple[Move, ...]) -> float:
    """The share of the first step in a sum that is formed step by step; 0 if there is no such sum."""
    move = next((move for move in moves if move.kind == "sum"), None)
    if move is None or move.algorithm == NATIVE:
        return 0.0
    most = max(map(len, move.groups or inputs.hosts), default=1)
    steps = ALGORITHMS[move.algorithm].cost(inputs.world_size, most).num_steps
    return 1 / steps if steps > 1 else 0.0


def _with_codec(inputs: Inputs, bucket: Bucket, groups: Sequence[tuple[Move, ...]]) -> tuple[Phase, ...]:
    """Add the time of encoding and decoding to their phases."""
    codec = inputs.codec
    coded = [number for number, moves in enumerate(groups) if not any(move.kind in _INSIDE for move in moves)]
    if codec is None or not coded:
        return tuple(Phase(moves) for moves in groups)
    encode_s, decode_s = codec.encode_s(bucket.nbytes), codec.decode_s(bucket.nbytes)
    issuing = coded[:1]
    if not inputs.strategy.codec.traits.decodes_alone:
        # Rounds that depend on each other: each encodes a payload.
        issuing = [number for number in coded if groups[number]]
    kinds = {move.kind for moves in groups for move in moves}
    found: list[Phase] = []
    for number, moves in enumerate(groups):
        before_s, after_s = (encode_s / len(issuing) if number in issuing else 0.0), 0.0
        scatter = next((move for move in moves if move.kind == "scatter"), None)
        if scatter is not None:
            # Shares of all payloads, which make one payload; their sum is encoded again.
            after_s = decode_s + codec.encode_s(bucket.nbytes / _num_ranks(inputs, scatter))
        elif number == coded[-1]:
            # An all-gather collects a payload of each rank, unless it collects the shares of one.
            whole = not kinds & {"scatter", "scatter_sum"}
            after_s = decode_s * max((_num_payloads(inputs, move, whole=whole) for move in moves), default=1)
        found.append(Phase(moves, before_s=before_s, after_s=after_s))
    return tuple(found)


def _num_payloads(inputs: Inputs, move: Move, *, whole: bool) -> int:
    """The number of payloads that a rank decodes after a move."""
    if move.kind == "mix":
        return 1 + move.peers  # its own, too
    return _num_ranks(inputs, move) if move.kind == "gather" and whole else 1


def _num_ranks(inputs: Inputs, move: Move) -> int:
    return len(move.groups or inputs.hosts) if move.among_hosts else inputs.world_size
