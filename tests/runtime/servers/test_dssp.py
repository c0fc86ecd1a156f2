"""A bound that follows the workers' pace: the steps that are granted, and a store that keeps to them."""

from __future__ import annotations

import json

import pytest
import torch

from laconic.errors import InvalidSetting
from laconic.synchronization import Dssp, Pace
from tests.runtime.servers.hand_made import BUCKET, ShelfByHand

pytestmark = pytest.mark.timeout(60)


def shortest_wait(fastest: Pace, slowest: Pace, room: int) -> int:
    """All ends of r more steps beside all arrivals of the slowest, as the paper simulates them."""
    ends = [fastest.last_s + r * fastest.step_s for r in range(room + 1)]
    arrivals = [slowest.last_s + k * slowest.step_s for k in range(1, 200)]
    waits = [min(abs(end - arrival) for arrival in arrivals) for end in ends]
    return waits.index(min(waits))


def test_as_many_steps_as_end_when_the_slowest_is_due() -> None:
    rule = Dssp(staleness=3, most=15)
    drawn = torch.rand(200, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).tolist()
    found = set()
    for last, interval, other, slow in drawn:
        fastest, slowest = Pace(10 + last, 0.05 + interval), Pace(10 - 3 * other, 0.1 + 5 * slow)
        granted = rule.more_steps(fastest, slowest, 12)
        assert granted == shortest_wait(fastest, slowest, 12)
        found.add(granted)
    assert len(found) > 8, "not the same whatever the pace"


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_store_lets_the_fastest_go_on_until_the_slowest_is_due() -> None:
    """Rank 1 pushes every 10 s; rank 0 takes 1 s a step, and after 21 s it is three steps ahead with nine to go."""
    clock = Clock()
    server = ShelfByHand("dssp(staleness=2, most=9) / parameter_server", 2, now_s=clock)
    zeros, steps = torch.zeros(BUCKET.numel), [0, 0]

    def push(rank: int, now_s: float) -> bool:
        clock.now_s = now_s
        server.push(rank, zeros, steps[rank])
        steps[rank] += 1
        return len(server.answers.to(rank)) == steps[rank]

    assert all([push(0, 1), push(0, 2)]), "as with ssp"
    assert not push(0, 3), "the slowest has no pace yet"
    push(1, 10)
    assert len(server.answers.to(0)) == 3
    assert not push(0, 11), "nor after one push"
    push(1, 20)
    # Now 4 against 2. At 21 s the next push makes it three ahead, and the slowest is due at 30 s: nine more steps would
    # end just then; the bound of 9 leaves seven.
    assert all(push(0, 21 + step) for step in range(7)), "up to nine ahead"
    assert not push(0, 28), "ten ahead"
    assert max(json.loads(frame.note)["lead"] for frame in server.answers.frames) == 9
    for now_s in range(30, 100, 10):
        push(1, now_s)
        assert len(server.answers.to(0)) == steps[0] - 1, "not before it is within staleness again"
    push(1, 100)
    assert len(server.answers.to(0)) == steps[0]


def test_only_the_fastest_gets_more() -> None:
    """Three workers that take 1, 2 and 10 s a step; the slowest is the one whose gradient is due last."""
    clock = Clock()
    server = ShelfByHand("dssp(staleness=0, most=4) / parameter_server", 3, now_s=clock)

    def answered(rank: int, now_s: float, step: int) -> bool:
        clock.now_s = now_s
        server.push(rank, torch.zeros(BUCKET.numel), step)
        return len(server.answers.to(rank)) == step + 1

    for rank, now_s in ((0, 0.0), (1, 0.1), (2, 0.2)):
        answered(rank, now_s, 0)
    for rank, now_s in ((0, 1.2), (1, 2.2), (2, 10.2)):
        answered(rank, now_s, 1)
    assert [len(server.answers.to(rank)) for rank in range(3)] == [2, 2, 2]
    assert answered(0, 11.2, 2)
    assert answered(0, 12.0, 3)
    assert not answered(1, 12.2, 2), "ahead of the slowest, and not the fastest"


def test_a_bound_that_cannot_move_is_refused() -> None:
    with pytest.raises(InvalidSetting, match=r'most must be > staleness \(4\), got 4.*"ssp\(staleness=4\)"'):
        Dssp(staleness=4, most=4)
