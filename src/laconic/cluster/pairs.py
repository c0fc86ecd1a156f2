"""How fast every two ranks exchange while all others do the same.

Measuring one pair alone tells little: an uplink that carries as much as one host's link is no bottleneck for one pair,
but is one when a whole rack sends. So ranks form pairs, all pairs swap messages at the same time, and in the next round
every rank has another partner. After n - 1 rounds every pair has exchanged once. The rounds are then repeated with
other combinations of simultaneous pairs, and the mean over the times of a pair counts.

    rate of a pair = bytes / (time of a large message - time of an empty one)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import torch

from laconic.cluster.trials import ELEMENT_BYTES, Stage
from laconic.core.hosts import Pairs
from laconic.core.transport import AllWork, Work

Round = tuple[tuple[int, int], ...]
"""Pairs of ranks that exchange at the same time, the smaller rank of each pair first."""

LIMIT_S = 4.0
"""How long the whole measurement may take, roughly."""
_COMPANIES = 3
"""How often every pair exchanges, each time together with other pairs."""
_SIZES = tuple(1 << power for power in (16, 18, 20, 22))
"""64 KiB to 4 MiB. Smaller messages would pass through the queues of switches without filling them."""


def meetings(world_size: int) -> Iterator[Round]:
    """The rounds in which every pair exchanges _COMPANIES times: n - 1 for each time, or n if n is odd.

    The order is that of a round-robin tournament: ranks sit around a table, one of them stays, and after every round
    the others move on by one seat. With an odd n, one rank is idle in each round. Each repetition seats the ranks in
    another order, the same on every rank.
    """
    seats = list(range(world_size + world_size % 2))
    for company in range(_COMPANIES):
        if company:
            random.Random(company).shuffle(seats)
        turning = seats[1:]
        for _ in turning:
            table = [seats[0], *turning]
            pairs = zip(table[: len(table) // 2], reversed(table), strict=False)
            yield tuple(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < world_size))
            turning = [turning[-1], *turning[:-1]]


def measure_pairs(stage: Stage, limit_s: float = LIMIT_S, on_progress: Callable[[str], None] | None = None) -> Pairs:
    """Measure the rate of every pair; every rank calls it and gets the same result."""
    transport = stage.transport
    world_size, rounds = transport.world_size, list(meetings(transport.world_size))
    small, large = stage.zeros(1), stage.zeros(_affordable(stage, rounds, limit_s) // ELEMENT_BYTES)
    small_back, large_back = torch.empty_like(small), torch.empty_like(large)
    empty_s = torch.full((world_size, world_size), torch.inf, dtype=torch.float64)
    full_s, times = torch.zeros_like(empty_s), torch.zeros_like(empty_s)
    for number, meeting in enumerate(rounds):
        peer = _peer(meeting, transport.rank)
        began_s = stage.time(partial(_swap, stage, peer, small, small_back))
        took_s = stage.time(partial(_swap, stage, peer, large, large_back))
        if peer is not None:
            empty_s[transport.rank, peer] = min(float(empty_s[transport.rank, peer]), began_s)
            full_s[transport.rank, peer] += took_s
            times[transport.rank, peer] += 1
        if on_progress is not None:
            on_progress(f"pairs: {number + 1} of {len(rounds)} rounds")
    # Without start-up; but where that is nearly all, chance must not make a link endlessly fast.
    mean_s = full_s / times.clamp(min=1)
    moving_s = torch.maximum(mean_s - empty_s.nan_to_num(posinf=0.0), mean_s / 2)
    # Both ends have timed the same swap; the slower one says how long it took.
    found = stage.slowest(moving_s.flatten().tolist())
    slower_s = torch.tensor(found, dtype=torch.float64).view(world_size, world_size)
    slower_s = torch.maximum(slower_s, slower_s.T).tolist()
    return tuple(
        tuple(float(f"{8 * large.nbytes / seconds:.4g}") if seconds else 0.0 for seconds in row) for row in slower_s
    )


def _affordable(stage: Stage, rounds: list[Round], limit_s: float) -> int:
    """The largest size with which all rounds should end in time; the smallest, if none does."""
    chosen = _SIZES[0]
    peer = _peer(rounds[0], stage.transport.rank)
    for nbytes in _SIZES:
        tensor = stage.zeros(nbytes // ELEMENT_BYTES)
        start = partial(_swap, stage, peer, tensor, torch.empty_like(tensor))
        times, took_s = stage.by_turns([start], 1)
        limit_s -= took_s
        # All ranks have the same numbers here, so all choose alike.
        if len(rounds) * times[0] > limit_s:
            break
        chosen = nbytes
    return chosen


def _peer(meeting: Round, rank: int) -> int | None:
    return next((sum(pair) - rank for pair in meeting if rank in pair), None)


def _swap(stage: Stage, peer: int | None, tensor: torch.Tensor, back: torch.Tensor) -> Work:
    """Swap messages with the peer, both directions at the same time; without a peer, do nothing."""
    if peer is None:
        return AllWork(())
    return stage.transport.send_receive([(peer, tensor)], [(peer, back)], purpose="control", what="a pair")
