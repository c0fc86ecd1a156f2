"""Shards: gradients go to their owners, weights come from them, and what is sent is what is declared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from laconic.architecture import Sharded
from laconic.architecture.contract import NothingMeasured
from laconic.compression import Compressor, ErrorFeedback, Int4, Int8, NoCompression, TopK
from laconic.core.exchange import Wire
from laconic.core.hosts import Hosts
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.plan import Bucket, Plan
from laconic.core.shard_rows import by_owner, layout_of, row_of
from laconic.core.tensor import TensorSpec
from laconic.errors import AttachError, IllegalCombination
from laconic.strategy import Strategy
from tests.strategy.generate import changed_wrappers, variants

pytestmark = pytest.mark.timeout(120)
TENSORS = [
    TensorSpec("even", (8, 6)),
    TensorSpec("uneven", (7, 5)),
    TensorSpec("bias", (5,)),
    TensorSpec("one", (1, 9)),
]


def legal() -> list[Compressor]:
    found = []
    for method in [*variants("compression"), *changed_wrappers()]:
        try:
            found.append(Strategy(architecture=Sharded(), compression=method).compression)
        except IllegalCombination:
            continue
    return found


def values(rank: int, tensor: TensorSpec) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + len(tensor.name))
    return torch.randn(tensor.numel, generator=generator).view(tensor.shape)


def as_fsdp_sends(rank: int, world_size: int) -> torch.Tensor:
    """Rows as FSDP fills them: chunks of the first dimension, each padded to the longest."""
    rows = []
    for owner in range(world_size):
        stretches = []
        for tensor in TENSORS:
            length = -(-tensor.shape[0] // world_size)
            chunk = values(rank, tensor)[owner * length : (owner + 1) * length]
            padded = torch.zeros((length, *tensor.shape[1:]))
            padded[: len(chunk)] = chunk
            stretches.append(padded.flatten())
        rows.append(torch.cat(stretches))
    return torch.stack(rows)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_rows_are_laid_out_as_fsdp_does(world_size: int) -> None:
    bucket = by_owner(TENSORS, world_size)
    layout, rows = layout_of(bucket, world_size), as_fsdp_sends(0, world_size)
    assert rows.shape == (world_size, layout.width)
    assert row_of(bucket, world_size).numel == layout.width
    assert bucket.numel == sum(tensor.numel for tensor in TENSORS)
    whole = {tensor.name: values(0, tensor).flatten() for tensor in TENSORS}
    for owner in range(world_size):
        for index, place in layout.pieces(owner):
            piece = bucket.tensors[index]
            assert torch.equal(rows[owner, place], whole[piece.owner][piece.start : piece.start + piece.numel])


def summed(compression: Compressor, world_size: int, steps: int = 2) -> list[torch.Tensor]:
    """Each owner's row after a few exchanges; bytes are checked."""
    architecture, bucket = Sharded(), by_owner(TENSORS, world_size)

    def rank(transport: InProcessTransport) -> torch.Tensor:
        state = architecture.init(compression, bucket)
        out = torch.empty(layout_of(bucket, world_size).width)
        for step in range(steps):
            state.moment = Moment(step, transport.rank, world_size, step)
            before = transport.traffic.sent_bytes("payload")
            rows = as_fsdp_sends(transport.rank, world_size)
            for work in architecture.scatter(rows, state, compression, Wire(transport, "rows"), out):
                work.wait()
            sent = transport.traffic.sent_bytes("payload") - before
            assert sent == (architecture.sent_bytes(bucket, compression, state.moment) if world_size > 1 else 0)
        return out

    return InProcessCluster(world_size).run(rank)


@pytest.mark.parametrize("compression", legal(), ids=str)
def test_owners_get_the_sum_of_what_each_payload_stands_for(compression: Compressor) -> None:
    """Against the compressor by itself, tensor by tensor."""
    world_size = 3
    bucket = by_owner(TENSORS, world_size)
    layout = layout_of(bucket, world_size)
    for owner, row in enumerate(summed(compression, world_size)):
        for index, place in layout.pieces(owner):
            piece = Bucket((bucket.tensors[index],))
            expected = torch.zeros(piece.numel)
            for sender in range(world_size):
                state, one = compression.init(piece), torch.empty(piece.numel)
                for step in range(2):
                    state.moment = Moment(step, sender, world_size, step)
                    payload = compression.encode(as_fsdp_sends(sender, world_size)[owner, place], state)
                state.moment = Moment(1, owner, world_size, 1)
                compression.decode(payload, one, state)
                expected += one
            torch.testing.assert_close(row[place], expected)


def test_nothing_is_lost_without_compression() -> None:
    for world_size in (1, 2, 3, 4):
        total = sum(as_fsdp_sends(rank, world_size) for rank in range(world_size))
        for owner, row in enumerate(summed(NoCompression(), world_size)):
            torch.testing.assert_close(row, total[owner])


def test_an_exchange_of_a_bucket_leaves_each_rank_the_mean_of_its_shard() -> None:
    architecture, world_size = Sharded(), 3
    bucket = by_owner(TENSORS, world_size)

    def rank(transport: InProcessTransport) -> torch.Tensor:
        flat = torch.arange(bucket.numel, dtype=torch.float32) * (transport.rank + 1) * architecture.share(world_size)
        state = architecture.init(NoCompression(), bucket)
        state.moment = Moment(0, transport.rank, world_size)
        for work in architecture.exchange(flat, state, NoCompression(), Wire(transport, "a bucket")):
            work.wait()
        return flat

    for number, flat in enumerate(InProcessCluster(world_size).run(rank)):
        mine = [index for index, _ in layout_of(bucket, world_size).pieces(number)]
        for index, (_, place) in enumerate(bucket.segments()):
            alone = torch.arange(bucket.numel, dtype=torch.float32)[place] * (number + 1) / world_size
            mean = 2 * torch.arange(bucket.numel, dtype=torch.float32)[place]
            torch.testing.assert_close(flat[place], mean if index in mine else alone)


@pytest.mark.parametrize("weights", ["none", "bf16", "fp16", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_the_same_everywhere_and_near_what_they_are(weights: str, dtype: torch.dtype) -> None:
    strategy = Strategy(architecture=Sharded(weights=weights))
    codec, architecture, world_size = strategy.weights_codec, strategy.architecture, 3
    bucket = by_owner([TensorSpec(t.name, t.shape, dtype) for t in TENSORS], world_size)

    def rank(transport: InProcessTransport) -> torch.Tensor:
        rows = torch.full((world_size, layout_of(bucket, world_size).width), 7.0, dtype=dtype)
        rows[transport.rank] = as_fsdp_sends(0, world_size)[transport.rank]
        state = architecture.init_weights(codec, bucket, world_size)
        state.moment = Moment(0, transport.rank, world_size)
        for work in architecture.gather(rows[transport.rank], state, codec, Wire(transport, "weights"), rows):
            work.wait()
        moment = state.moment
        assert transport.traffic.sent_bytes("payload") == architecture.gathered_bytes(bucket, codec, moment)
        return rows

    gathered = InProcessCluster(world_size).run(rank)
    near = {"none": 0.0, "bf16": 0.01, "fp16": 1e-3, "int8": 0.02, "int4": 0.3}[weights]
    for rows in gathered:
        assert torch.equal(rows, gathered[0])
        torch.testing.assert_close(rows, as_fsdp_sends(0, world_size).to(dtype), rtol=near, atol=near)


def test_a_step_sends_its_gradients_once_and_its_weights_for_each_pass() -> None:
    moment = Moment.steady(4)
    strategy = Strategy.parse("bsp / sharded(weights=int8) / int4 + error_feedback")
    plan = strategy.plan([TensorSpec("w", (64, 64))], 4)
    (bucket,), (weights,) = plan.buckets, plan.weights
    row = Int8().payload_bytes(Bucket((TensorSpec("w", (16, 64)),)), moment)
    sent = Int4().payload_bytes(Bucket((TensorSpec("w", (16, 64)),)), moment)
    assert strategy.plan_bytes(plan, moment) == 3 * sent + 2 * 3 * row
    assert strategy.architecture.gathered_bytes(weights, Int8(), moment) == 3 * row
    once = strategy.plan([TensorSpec("w", (64, 64), gathers=1)], 4)
    assert strategy.plan_bytes(once, moment) == 3 * sent + 3 * row
    assert strategy.state_bytes([TensorSpec("w", (64, 64))]) == 4 * 64 * 64, "of the whole gradient, and no sums"
    assert bucket.numel == 64 * 64


def test_parts_are_what_becomes_ready_together() -> None:
    tensors = [TensorSpec(name, (100, 100), ready_with=name[0]) for name in ("b2", "b1", "a2", "a1")]
    plan = Strategy.parse("bsp / sharded").plan(tensors, 2)
    assert [[t.owner for t in bucket.tensors] for bucket in plan.buckets] == [["b2", "b1"] * 2, ["a2", "a1"] * 2]
    assert plan.weights == plan.buckets[::-1]
    again = Sharded().cut(Plan((Bucket((tensors[0],)), Bucket((tensors[1],)))), 2, tensors=True)
    assert [[t.owner for t in bucket.tensors] for bucket in again.buckets] == [["b2", "b1"] * 2]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("diloco / sharded", "whole model on each rank"),
        ("onebit_adam / sharded / onebit", "whole model on each rank"),
        ("demo / sharded / topk", "whole model on each rank"),
        ("bsp / sharded / powersgd + error_feedback", "decodes each payload by itself"),
        ("bsp / sharded / int8 + per_layer", "decodes each payload by itself"),
        ("bsp / sharded / int8(route=gather)", "route has no effect"),
        ("bsp / sharded / int8 / priority", "has no effect with sharded"),
        ("bsp / sharded / int8 / fusion(bytes=1MiB)", "has no effect with sharded"),
    ],
)
def test_what_has_no_meaning_on_shards_is_refused(text: str, reason: str) -> None:
    with pytest.raises(IllegalCombination, match=reason):
        Strategy.parse(text)


@pytest.mark.parametrize("compression", [ErrorFeedback(Int8()), ErrorFeedback(TopK(density=0.5))], ids=str)
def test_error_feedback_keeps_a_residual_for_every_piece(compression: Compressor) -> None:
    bucket = by_owner(TENSORS, 3)
    kept = Sharded().init(compression, bucket).by_parameter()
    assert {name: fields["error_feedback.residual"].numel() for name, fields in kept.items()} == {
        piece.name: piece.numel for piece in bucket.tensors if piece.numel
    }


HOSTS = ((0, 1), (2, 3))
TWO_LEVELS = "bsp / sharded(between={}) / {} / fusion"


class ByHost:
    """A transport that notes how many bytes go to ranks of other hosts."""

    def __init__(self, transport: InProcessTransport) -> None:
        self._transport = transport
        self.inside = self.between = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send_receive(self, sends: Any, receives: Any, **about: Any) -> Any:
        here = next(host for host in HOSTS if self._transport.rank in host)
        for peer, tensor in sends:
            if peer in here:
                self.inside += tensor.nbytes
            else:
                self.between += tensor.nbytes
        return self._transport.send_receive(sends, receives, **about)


@pytest.mark.parametrize("between", ["none", "bf16", "int8", "int4"])
@pytest.mark.parametrize("inside", ["none", "int8", "topk(density=0.5)", "int4 + error_feedback"])
def test_hosts_add_up_first_and_bytes_of_both_levels_are_those_declared(inside: str, between: str) -> None:
    """Against both compressors by themselves: of each piece inside a host, then of the sums of hosts."""
    strategy = Strategy.parse(TWO_LEVELS.format(between, inside))
    architecture, world_size = strategy.architecture.settled(lambda: HOSTS, NothingMeasured()), 4
    codec, sums = strategy.codec, strategy.codec.between_hosts
    assert sums is not None
    bucket = by_owner(TENSORS, world_size)
    layout = layout_of(bucket, world_size)

    def rank(transport: InProcessTransport) -> torch.Tensor:
        counted = ByHost(transport)
        state = strategy.init(bucket)
        state.moment = Moment(0, transport.rank, world_size, 0)
        out = torch.full((layout.width,), 7.0)
        rows = as_fsdp_sends(transport.rank, world_size)
        for work in architecture.scatter(rows, state, codec, Wire(counted, "rows"), out):
            work.wait()
        assert counted.between == architecture.sent_between(bucket, codec, state.moment) > 0
        assert counted.inside + counted.between == architecture.sent_bytes(bucket, codec, state.moment)
        assert transport.traffic.sent_bytes("payload") == counted.inside + counted.between
        return out

    def through(compression: Compressor, values: torch.Tensor, piece: TensorSpec, number: int) -> torch.Tensor:
        state, arrived = compression.init(Bucket((piece,))), torch.empty_like(values)
        state.moment = Moment(0, number, world_size, 0)
        compression.decode(compression.encode(values.clone(), state), arrived, state)
        return arrived

    for owner, row in enumerate(InProcessCluster(world_size, hosts=HOSTS).run(rank)):
        for index, place in layout.pieces(owner):
            piece, expected = bucket.tensors[index], torch.zeros(bucket.tensors[index].numel)
            for host in HOSTS:
                sent = [as_fsdp_sends(sender, world_size)[owner, place] for sender in host]
                total = sum(through(strategy.compression, one, piece, who) for one, who in zip(sent, host, strict=True))
                expected += through(sums, total, piece, world_size)
            torch.testing.assert_close(row[place], expected)


def test_fewer_bytes_cross_between_hosts_than_if_each_rank_sent_to_each_owner() -> None:
    moment, tensors = Moment.steady(8), [TensorSpec("w", (512, 512))]
    flat = Strategy.parse("bsp / sharded / int8")
    hosts = (tuple(range(4)), tuple(range(4, 8)))
    two = Strategy.parse("bsp / sharded(between=int4) / int8")
    whom = two.architecture.settled(lambda: hosts, NothingMeasured())
    (bucket,) = flat.plan(tensors, 8).buckets
    row = flat.architecture.sent_bytes(bucket, flat.codec, moment) / 7
    between = whom.sent_between(bucket, two.codec, moment)
    assert between is not None
    assert between < 4 * row / 4 * 0.6, "one sum in 4 bits, where four ranks would send one each in 8"
    assert whom.sent_bytes(bucket, two.codec, moment) - between == 3 * 2 * row
    # Before anybody knows, half of the ranks are taken to be on each of two hosts.
    assert two.architecture.sent_bytes(bucket, two.codec, moment) == whom.sent_bytes(bucket, two.codec, moment)


@pytest.mark.parametrize(
    ("hosts", "reason"),
    [
        (((0, 1, 2, 3),), "all ranks share one host"),
        (((0,), (1,)), "every rank has a host of its own"),
        (((0, 1), (2,)), "hosts have 1 to 2 ranks"),
    ],
)
def test_hosts_that_have_nothing_to_add_up_are_refused(hosts: Hosts, reason: str) -> None:
    with pytest.raises(AttachError, match=reason):
        Sharded(between="int4").settled(lambda: hosts, NothingMeasured())
    assert Sharded().settled(lambda: hosts, NothingMeasured()) == Sharded()
