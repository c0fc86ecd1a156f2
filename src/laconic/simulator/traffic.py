"""Bytes one rank sends, from the moves of an exchange: for numbers of ranks at which a collective has too many rows."""

from __future__ import annotations

from laconic.core.exchange import Move
from laconic.core.hosts import Hosts
from laconic.core.plan import Bucket
from laconic.core.sent_bytes import all_gather_sent, all_reduce_sent, shard_exchange_sent
from laconic.simulator.lowering.task_graph import Inputs


def sent_bytes(inputs: Inputs, bucket: Bucket, *, decoupled: bool = False) -> int:
    """Bytes that rank 0 sends for one exchange of `bucket`; every sum is counted as a ring."""
    strategy = inputs.strategy
    moves = strategy.architecture.moves(bucket, strategy.codec, inputs.moment, decoupled=decoupled)
    return sum(_sent(move, move.groups or inputs.hosts) for move in moves)


def _sent(move: Move, hosts: Hosts) -> int:
    ranks, ranks_per_host = len(hosts) if move.among_hosts else sum(map(len, hosts)), len(hosts[0])
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
