"""Bytes one rank sends, from the moves of an exchange: for worlds in which a collective would have too many rows."""

from __future__ import annotations

from laconic.core.exchange import Move
from laconic.core.plan import Bucket
from laconic.core.transport import all_gather_sent, all_reduce_sent, shard_exchange_sent
from laconic.simulator.lowering.task_graph import Inputs


def sent_bytes(inputs: Inputs, bucket: Bucket, *, halves: bool = False) -> int:
    """What rank 0 sends for one exchange of `bucket`; sums are counted as a ring sends them, whatever forms them."""
    strategy = inputs.strategy
    moves = strategy.architecture.moves(bucket, strategy.codec, inputs.moment, halves=halves)
    hosts = inputs.hosts
    return sum(_sent(move, len(hosts) if move.among_hosts else inputs.world_size, len(hosts[0])) for move in moves)


def _sent(move: Move, ranks: int, ranks_per_host: int) -> int:
    if move.kind == "to_leaders":
        return 0  # rank 0 is one
    if move.kind == "from_leaders":
        return (ranks_per_host - 1).bit_length() * move.nbytes
    if move.kind == "sum":
        return sum(all_reduce_sent(size, ranks) for size in move.sizes)
    if move.kind == "gather":
        return sum(all_gather_sent(size, ranks) for size in move.sizes)
    if move.kind in {"scatter", "scatter_sum"}:
        return sum(shard_exchange_sent(size, ranks) for size in move.sizes)
    assert move.kind == "send", "nothing else is part of an all-reduce"
    return move.nbytes
