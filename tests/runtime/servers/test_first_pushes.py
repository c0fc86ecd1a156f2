"""A server that applies the mean of the first gradients of a step, driven by hand in a fixed order of arrivals."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch

from laconic.core.frames import Frame
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.errors import AttachError, CommunicationError
from laconic.runtime.servers.first_pushes import FirstPushes, FirstPushStore
from laconic.runtime.servers.protocol import PUSH, Configuration
from laconic.strategy import Strategy
from tests.runtime.servers.hand_made import SGD, Answers

pytestmark = pytest.mark.timeout(60)

BUCKETS = {0: Bucket((TensorSpec("a", (3, 2)),)), 1: Bucket((TensorSpec("b", (5,)), TensorSpec("c", (2,))))}
NUMEL = 13


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class ByHand:
    """A server with two buckets."""

    def __init__(self, world_size: int, *, spare: int = 1, compression: str = "none") -> None:
        text = f"backup(spare={spare}) / parameter_server(shards=1) / {compression}"
        strategy = Strategy.parse(text)
        members = (("a", 0), ("b", 0), ("c", 0))
        about = Configuration(text, world_size, 0, BUCKETS, "SGD", (SGD,), members)
        self.clock, self.answers, self.compression = Clock(), Answers(), strategy.compression
        self.steps = FirstPushes(about, strategy.synchronization, now_s=self.clock)
        self.start = torch.arange(float(NUMEL))
        parts = zip(BUCKETS, self.start.split([6, 7]), strict=True)
        self.stores = {
            number: FirstPushStore(number, strategy.compression, self.steps, values.clone()) for number, values in parts
        }
        self.made = [0] * world_size

    def send(self, rank: int, number: int, gradient: torch.Tensor, *, lr: float = 0.5, unused: Sequence[int] = ()):
        """One bucket of the next gradient of a rank."""
        part = gradient.split([6, 7])[number]
        note = json.dumps({"step": self.made[rank], "groups": [{**SGD, "lr": lr}], "unused": list(unused)})
        self.stores[number].push(Frame(PUSH, rank, 0, number, note, (part.clone(),)), self.answers)

    def push(self, rank: int, gradient: torch.Tensor, *, lr: float = 0.5) -> None:
        """A whole gradient."""
        for number in BUCKETS:
            self.send(rank, number, gradient, lr=lr)
        self.made[rank] += 1

    def rest(self, rank: int) -> None:
        for store in self.stores.values():
            store.rest(rank)

    def values(self, rank: int = 0) -> torch.Tensor:
        return torch.cat([store.pull(rank) for store in self.stores.values()])

    def facts(self, rank: int) -> list[tuple[int, int]]:
        """Whether each gradient of a rank was dropped, and its staleness; the same for both buckets."""
        notes = [json.loads(frame.note) for frame in self.answers.to(rank)]
        found = [(note["dropped"], note["staleness"]) for note in notes]
        assert found[::2] == found[1::2]
        return found[::2]


def gradient(rank: int, number: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * number + rank))


@pytest.mark.parametrize(("world_size", "spare"), [(2, 1), (3, 1), (4, 1), (4, 2), (5, 4)])
def test_the_mean_of_the_first_of_every_step_is_applied_and_the_rest_dropped(world_size: int, spare: int) -> None:
    """Against a reference that keeps, for every worker, the update that its parameters are of."""
    server, first = ByHand(world_size, spare=spare), world_size - spare
    x, has, updates, arrived = server.start.clone(), [0] * world_size, 0, dict[int, torch.Tensor]()
    expected: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    num_dropped = 0
    for turn, rank in enumerate(torch.randint(world_size, (300,), generator=torch.Generator().manual_seed(1)).tolist()):
        if rank in arrived:
            continue  # it waits
        server.push(rank, gradient(rank, turn))
        if has[rank] < updates:
            expected[rank].append((1, updates - has[rank]))
            has[rank] = updates
            num_dropped += 1
        else:
            arrived[rank] = gradient(rank, turn)
        if len(arrived) == first:
            x -= 0.5 * sum(arrived.values()) / first
            updates += 1
            for one in arrived:
                expected[one].append((0, 0))
                has[one] = updates
            arrived = {}
        for one in range(world_size):
            assert server.facts(one) == expected[one]
        frames = server.answers.to(rank)[-2:]
        if rank not in arrived:
            answer = torch.cat([frame.tensors[0] for frame in sorted(frames, key=lambda frame: frame.key)])
            torch.testing.assert_close(answer, x, rtol=0, atol=1e-4)
    assert num_dropped > 20
    assert updates > 20


def test_a_late_worker_gets_the_newest_parameters_at_once() -> None:
    server = ByHand(3)
    for step in range(3):
        for rank in (0, 1):
            server.push(rank, gradient(rank, step))
    newest = server.values()
    server.push(2, 1e6 * gradient(2, 0))
    assert server.facts(2) == [(1, 3)]
    assert torch.equal(server.answers.to(2)[0].tensors[0], newest[:6])
    assert torch.equal(server.values(), newest), "its gradient is lost"
    server.push(2, gradient(2, 1))
    server.push(1, gradient(1, 9))
    assert server.facts(2)[1] == (0, 0), "with the newest parameters it may be among the first"


def test_a_gradient_counts_as_a_whole() -> None:
    """Rank 0 comes first to one bucket and rank 1 to the other: both buckets take the same two workers."""
    server = ByHand(3)
    grads = [gradient(rank, 0) for rank in range(3)]
    server.send(0, 0, grads[0])
    server.send(2, 0, grads[2])
    server.send(1, 1, grads[1])
    server.send(2, 1, grads[2])
    assert not server.answers.frames, "one whole gradient"
    server.send(1, 0, grads[1])
    expected = server.start - 0.5 * (grads[1] + grads[2]) / 2
    torch.testing.assert_close(server.values(1), expected, rtol=0, atol=1e-5)
    assert not server.answers.to(0)
    server.send(0, 1, grads[0])
    assert server.facts(0) == [(1, 1)]


def test_nobody_waits_for_a_worker_that_stopped_in_the_middle_of_its_gradient() -> None:
    server = ByHand(3)
    server.send(2, 0, gradient(2, 0))
    for step in range(5):
        for rank in (0, 1):
            server.push(rank, gradient(rank, step))
    assert server.facts(0) == server.facts(1) == [(0, 0)] * 5
    server.send(2, 1, gradient(2, 0))
    assert server.facts(2) == [(1, 5)]


def test_the_order_of_the_first_does_not_change_a_bit() -> None:
    one, other = ByHand(4), ByHand(4)
    for step in range(4):
        for rank in (0, 1, 2):
            one.push(rank, gradient(rank, step))
        for rank in (2, 0, 1):
            other.push(rank, gradient(rank, step))
    assert torch.equal(one.values(), other.values())


def test_settings_are_those_of_the_worker_with_the_most_steps() -> None:
    server = ByHand(3)
    server.made = [4, 9, 4]
    grads = gradient(0, 0), gradient(1, 0)
    server.push(1, grads[1], lr=0.01)
    server.push(0, grads[0], lr=0.5)
    torch.testing.assert_close(server.values(), server.start - 0.01 * sum(grads) / 2, rtol=0, atol=1e-6)


def test_a_parameter_moves_if_one_of_the_first_has_used_it() -> None:
    server = ByHand(3)
    zeros = torch.zeros(NUMEL)
    for rank, unused in ((0, [0, 1]), (1, [0])):
        server.send(rank, 0, zeros)
        server.send(rank, 1, torch.cat([zeros[:11], float(rank) * torch.ones(2)]), unused=unused)
    assert torch.equal(server.values()[:11], server.start[:11])
    assert torch.equal(server.values()[11:], server.start[11:] - 0.25)


def test_those_who_are_missing_are_named() -> None:
    server = ByHand(4)
    assert server.steps.waiting_for() == (0.0, [])
    server.push(1, gradient(1, 0))
    server.clock.now_s = 3.0
    server.push(3, gradient(3, 0))
    server.send(2, 0, gradient(2, 0))
    server.clock.now_s = 5.0
    assert server.steps.waiting_for() == (5.0, [0, 2])
    assert server.stores[1].waiting_for() == (5.0, [0, 2])
    server.rest(0)
    assert server.steps.waiting_for()[1] == [2], "rank 0 waits elsewhere"


def test_when_too_few_are_left_gradients_are_dropped_and_nobody_waits() -> None:
    server = ByHand(3)
    server.push(0, gradient(0, 0))
    server.rest(1)
    assert not server.answers.frames, "rank 2 is still to come"
    server.steps.leave(2)
    assert server.facts(0) == [(1, 0)]
    server.push(0, gradient(0, 1))
    assert server.facts(0) == [(1, 0)] * 2
    assert torch.equal(server.values(), server.start), "an update is never the mean of fewer"
    server.push(1, gradient(1, 0))
    server.push(0, gradient(0, 2))
    assert server.facts(0)[2] == server.facts(1)[0] == (0, 0)


def test_all_are_waited_for_again_when_all_have_rested() -> None:
    server = ByHand(3)
    for rank in (0, 1, 2):
        server.rest(rank)
    server.push(2, gradient(2, 0))
    assert not server.answers.frames
    server.push(1, gradient(1, 0))
    assert server.facts(1) == server.facts(2) == [(0, 0)]


def three_updates_without_rank_2(*, interval_s: float) -> ByHand:
    """The others have made three updates, the last at 100 s; rank 2 has then got the newest parameters."""
    server = ByHand(3)
    for step in range(3):
        server.clock.now_s = 100.0 + (step - 2) * interval_s
        for rank in (0, 1):
            server.push(rank, gradient(rank, step))
    server.push(2, gradient(2, 0))
    assert server.facts(2) == [(1, 3)]
    return server


@pytest.mark.parametrize(("interval_s", "limit_s"), [(3.0, 12.0), (0.001, 0.08)])
def test_a_worker_that_is_behind_waits_for_four_intervals_until_it_has_made_as_many_steps(
    interval_s: float, limit_s: float
) -> None:
    server = three_updates_without_rank_2(interval_s=interval_s)
    newest = server.values(2)
    for step in (1, 2):
        server.push(2, gradient(2, step))
        server.clock.now_s += 0.99 * limit_s
        server.steps.release_late()
        assert len(server.facts(2)) == step, "the others may still come"
        server.clock.now_s += 0.02 * limit_s
        server.steps.release_late()
        assert server.facts(2)[step:] == [(1, 0)]
        answer = sorted(server.answers.to(2)[-2:], key=lambda frame: frame.key)
        assert torch.equal(torch.cat([frame.tensors[0] for frame in answer]), newest)
    server.push(2, gradient(2, 3))
    server.clock.now_s += 1000 * limit_s
    server.steps.release_late()
    assert len(server.facts(2)) == 3, "with as many steps as the others it waits for them"
    assert torch.equal(server.values(0), newest)
    server.push(0, gradient(0, 3))
    assert server.facts(2)[3:] == [(0, 0)]


def test_a_worker_that_is_behind_counts_if_another_comes_in_time() -> None:
    server = three_updates_without_rank_2(interval_s=1.0)
    server.push(2, gradient(2, 1))
    server.clock.now_s += 3.9
    server.steps.release_late()
    server.push(1, gradient(1, 3))
    assert server.facts(2)[1:] == [(0, 0)]


def test_the_typical_interval_is_a_median_without_the_time_of_a_rest() -> None:
    server = ByHand(3)
    assert server.steps.typical_s is None
    now_s = 0.0
    for number, interval_s in enumerate((0.0, 1.0, 100.0, 2.0)):
        now_s += interval_s
        server.clock.now_s = now_s
        for rank in (0, 1):
            server.push(rank, gradient(rank, number))
    assert server.steps.typical_s == 2.0
    for rank in (0, 1, 2):
        server.rest(rank)
        server.values(rank)
    server.clock.now_s += 1000.0
    for step in range(2):
        for rank in (0, 1):
            server.push(rank, gradient(rank, step))
        server.clock.now_s += 1.0
    assert server.steps.typical_s == 1.5
    for step in range(16):
        for rank in (0, 1):
            server.push(rank, gradient(rank, step))
        server.clock.now_s += 7.0
    assert server.steps.typical_s == 7.0, "old intervals are forgotten"


def test_without_an_interval_a_worker_that_is_behind_waits() -> None:
    server = ByHand(3)
    server.push(2, gradient(2, 0))
    server.rest(0)
    server.rest(1)
    assert server.facts(2) == [(1, 0)], "too few were left"
    server.push(0, gradient(0, 0))
    server.clock.now_s = 1e6
    server.steps.release_late()
    assert not server.facts(0)


@pytest.mark.parametrize(
    "note",
    [
        "{",
        json.dumps({"step": -1, "groups": [SGD], "unused": []}),
        json.dumps({"step": 0, "groups": [], "unused": []}),
        json.dumps({"step": 0, "groups": [SGD], "unused": ["a"]}),
        json.dumps({"step": 7, "groups": [SGD], "unused": []}),
    ],
)
def test_notes_that_make_no_sense_change_nothing(note: str) -> None:
    server, twin = ByHand(2), ByHand(2)
    for one in (server, twin):
        one.send(0, 0, gradient(0, 0))
    with pytest.raises(CommunicationError):
        server.stores[1].push(Frame(PUSH, 0, 0, 1, note, (torch.ones(7),)), server.answers)
    good = json.dumps({"step": 0, "groups": [SGD], "unused": []})
    with pytest.raises(CommunicationError, match="a payload of rank 1 has 12 bytes, expected 24"):
        server.stores[0].push(Frame(PUSH, 1, 0, 0, good, (torch.ones(3),)), server.answers)
    with pytest.raises(CommunicationError, match="rank 0 pushes again before its last push was answered"):
        server.send(0, 0, gradient(0, 1))
    for one in (server, twin):
        one.send(0, 1, gradient(0, 0))
    assert torch.equal(server.values(), twin.values())
    assert not torch.equal(server.values(), server.start)


def test_a_lost_job_ends_every_wait() -> None:
    server = ByHand(3)
    server.push(0, gradient(0, 0))
    server.send(1, 0, gradient(1, 0))
    server.stores[0].fail("job lost: rank 2 is gone")
    assert server.answers.errors() == dict.fromkeys((0, 1), "job lost: rank 2 is gone")
    with pytest.raises(CommunicationError, match="rank 2 is gone"):
        server.send(1, 1, gradient(1, 0))


def test_more_workers_than_spare_ones_are_needed() -> None:
    with pytest.raises(AttachError, match=r"synchronization.backup.spare must be < the number of workers \(2\), got 2"):
        ByHand(2, spare=2)
