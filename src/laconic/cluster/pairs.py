"""How fast every two ranks exchange while all others do the same.

One pair alone tells little: an uplink that carries as much as one host's link is no bottleneck for it, and is one when
a whole rack sends. So ranks form pairs, all pairs swap messages at the same time, and in the next round everyone has
another partner. After n - 1 rounds everyone has met everyone. That is repeated with pairs meeting in other company,
and of the times of a pair the mean counts.

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
"""Ranks that meet at the same time, the smaller one of each pair first."""

LIMIT_S = 4.0
"""How long all of it may take, roughly."""
_COMPANIES = 3
"""How often every pair meets, each time while other pairs meet beside it."""
_SIZES = tuple(1 << power for power in (16, 18, 20, 22))
"""64 KiB to 4 MiB. Smaller messages would pass through the queues of switches without filling them."""


def meetings(world_size: int) -> Iterator[Round]:
    """Every pair of ranks in every company: each of them n - 1 rounds, or n where one rank stays alone in each.

    Ranks sit around a table with one fixed; after every round the others move on by one seat (a round-robin
    tournament). For another company they are seated in another order, the same on every rank.
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
    """Measure the rate of every pair; every rank calls it and comes to the same."""
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
    """Send to a rank what it sends here, at the same time; without a peer, nothing."""
    if peer is None:
        return AllWork(())
    return stage.transport.send_receive([(peer, tensor)], [(peer, back)], purpose="control", what="a pair")
