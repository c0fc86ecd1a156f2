"""Sums formed by a server, driven by hand."""

from __future__ import annotations

import pytest
import torch

from laconic.core.moment import Moment
from laconic.core.payload import Payload
from laconic.errors import CommunicationError
from tests.runtime.servers.hand_made import BUCKET, AggregatorByHand


def gradients(world_size: int, step: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(step)
    return list(torch.randn(world_size, BUCKET.numel))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_sum_is_formed_in_the_order_of_ranks_whoever_comes_first(world_size: int) -> None:
    parts = gradients(world_size)
    server = AggregatorByHand("bsp / parameter_server", world_size)
    for rank in reversed(range(world_size)):
        assert not server.answers.frames
        server.add(rank, parts[rank])
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    assert [frame.sender for frame in server.answers.frames] == list(range(world_size))
    for frame in server.answers.frames:
        assert torch.equal(frame.tensors[0], total)


def test_plain_tensors_are_summed_as_they_are() -> None:
    server = AggregatorByHand("bsp / parameter_server / powersgd + error_feedback", 3)
    for rank in range(3):
        server.add_tensors(rank, [torch.full((4,), float(rank)), torch.full((2,), 10.0 * rank)])
    for frame in server.answers.frames:
        assert frame.tensors[0].tolist() == [3.0] * 4
        assert frame.tensors[1].tolist() == [30.0] * 2


def topk(flat: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest of each tensor of the bucket."""
    kept = torch.zeros_like(flat)
    for _, place in BUCKET.segments():
        part = flat[place]
        where = part.abs().topk(min(k, part.numel())).indices
        kept[place][where] = part[where]
    return kept


def test_error_feedback_works_in_both_directions() -> None:
    server = AggregatorByHand("bsp / parameter_server / topk(0.3, indices=int32) + error_feedback", 3)
    own, owed = [torch.zeros(BUCKET.numel) for _ in range(3)], torch.zeros(BUCKET.numel)
    for step in range(12):
        parts = gradients(3, step)
        total = torch.zeros(BUCKET.numel)
        for rank, part in enumerate(parts):
            corrected = own[rank] + part
            sent = topk(corrected, 2)  # ceil(0.3 * 6) and ceil(0.3 * 5)
            own[rank] = corrected - sent
            total += sent
            server.add(rank, part, step)
        owed += total
        expected = topk(owed, 2)
        owed = owed - expected
        answer = server.answers.frames[-1]
        state = server.compression.init(BUCKET)
        state.moment = Moment(step, 0, 3, step)
        found = torch.empty(BUCKET.numel)
        server.compression.back().decode(Payload(answer.tensors), found, state)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    kept = server.aggregator.state()
    assert sorted(kept) == ["a|error_feedback.residual|1", "b|error_feedback.residual|1"]
    torch.testing.assert_close(torch.cat([kept[key] for key in sorted(kept)]), owed, rtol=0, atol=1e-5)


def test_what_is_owed_can_be_saved_and_put_back() -> None:
    strategy = "bsp / parameter_server / topk(0.3) + error_feedback"
    one, other = AggregatorByHand(strategy, 1), AggregatorByHand(strategy, 1)
    one.add(0, gradients(1)[0])
    saved = one.aggregator.state()
    other.aggregator.restore(tuple(saved.values()), list(saved))
    for name, value in other.aggregator.state().items():
        assert torch.equal(value, saved[name])
    a, b = "a|error_feedback.residual|1", "b|error_feedback.residual|1"
    for tensors, keys, told in (
        ((torch.ones(6), torch.ones(5), torch.ones(6)), [a, b, "c|error_feedback.residual|1"], "this server does not"),
        ((torch.ones(6),), [a], "lacks .*b.error_feedback.residual"),
        ((torch.ones(6),), [a, b], "has 2 fields and 1 tensors"),
        ((torch.ones(5), torch.ones(5)), [a, b], "has 5 .* values of .*a.error_feedback.* instead of 6"),
        ((torch.ones(6).double(), torch.ones(5)), [a, b], "float64 values of .*a.error_feedback"),
        ((torch.full((6,), float("nan")), torch.ones(5)), [a, b], "NaN or infinite values in .*a.error_feedback"),
    ):
        with pytest.raises(CommunicationError, match=told):
            other.aggregator.restore(tensors, keys)
    for name, value in other.aggregator.state().items():
        assert torch.equal(value, saved[name])


def test_ranks_that_send_different_things_are_named() -> None:
    server = AggregatorByHand("bsp / parameter_server", 3)
    server.add_tensors(0, [torch.ones(4)], step=7)
    server.add_tensors(1, [torch.ones(4)], step=7)
    server.add_tensors(2, [torch.ones(4)], step=8)
    errors = server.answers.errors()
    assert sorted(errors) == [0, 1, 2]
    for error in errors.values():
        assert "rank 0 plain tensors of step 7, round 7 (4 float32)" in error
        assert "rank 2 plain tensors of step 8, round 8 (4 float32)" in error


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(10), torch.ones(12), torch.ones(11, dtype=torch.float64), torch.ones(0)],
    ids=["short", "long", "wide", "empty"],
)
def test_a_payload_of_the_wrong_size_is_blamed_on_its_rank(tensor: torch.Tensor) -> None:
    server = AggregatorByHand("bsp / parameter_server / bf16", 2)
    server.add_tensors(1, [tensor], decoded=True)
    server.add_tensors(0, [tensor], decoded=True)
    assert all("a payload of rank 0 has" in error for error in server.answers.errors().values())
    server.add(0, torch.ones(BUCKET.numel))
    server.add(1, torch.ones(BUCKET.numel))
    assert len(server.answers.frames) == 4, "the server lives on"
    assert len(server.answers.errors()) == 2


def test_who_is_waited_for() -> None:
    server = AggregatorByHand("bsp / parameter_server", 3)
    assert server.aggregator.waiting_for() == (0.0, [])
    server.add(1, torch.ones(BUCKET.numel))
    waited_s, ranks = server.aggregator.waiting_for()
    assert ranks == [0, 2]
    assert 0 <= waited_s < 5


def test_a_rank_that_has_left_is_named_unless_its_part_is_there() -> None:
    server = AggregatorByHand("bsp / parameter_server", 2)
    server.add(0, torch.ones(BUCKET.numel))
    server.aggregator.leave(0)
    server.add(1, torch.ones(BUCKET.numel))
    assert not server.answers.errors()
    with pytest.raises(CommunicationError, match="rank 0 has detached"):
        server.add(1, torch.ones(BUCKET.numel), 1)
    other = AggregatorByHand("bsp / parameter_server", 2)
    other.add(0, torch.ones(BUCKET.numel))
    other.aggregator.leave(1)
    assert "rank 1 has detached" in other.answers.errors()[0]


def test_a_rank_cannot_fill_the_memory_of_a_server() -> None:
    server = AggregatorByHand("bsp / parameter_server", 2)
    for step in range(8):
        server.add(1, torch.ones(BUCKET.numel), step)
    with pytest.raises(CommunicationError, match="rank 1 has asked for 8 sums of one bucket without waiting"):
        server.add(1, torch.ones(BUCKET.numel), 8)
