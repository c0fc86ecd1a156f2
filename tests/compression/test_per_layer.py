"""Some parameters as they are, the others compressed, both at the same time."""

from __future__ import annotations

import pytest
import torch

from laconic.architecture.all_reduce import Everyone
from laconic.compression import Bf16, Compressor, ErrorFeedback, NoCompression, PerLayer, PowerSgd
from laconic.core.exchange import Exchange, in_lockstep
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.optimizer_facts import OptimizerFacts
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.tensor import TensorSpec
from laconic.core.transport import DoneWork
from laconic.errors import AttachError
from tests.compression.test_laws import bits, exchange, values

SGD = OptimizerFacts(name="SGD")
TENSORS = (
    TensorSpec("0.weight", (12, 20)),
    TensorSpec("0.bias", (12,)),
    TensorSpec("norm.weight", (12,)),
    TensorSpec("1.weight", (12, 20)),
    TensorSpec("norm.table", (9, 14)),
    TensorSpec("1.bias", (20,)),
)
BUCKET = Bucket(TENSORS)
MOMENT = Moment(0, 0, 2)


def by_parameter(compressor: Compressor, bucket: Bucket, steps: int = 3) -> dict[str, bytes]:
    """What rank 0 holds of each parameter after some steps; a parameter's gradient does not depend on the bucket."""

    def one_rank(transport: InProcessTransport) -> dict[str, bytes]:
        state = compressor.init(bucket)
        for step in range(steps):
            gradients = [
                values(transport.rank, 100 * step + TENSORS.index(tensor), tensor.numel, tensor.dtype)
                for tensor in bucket.tensors
            ]
            flat = torch.cat(gradients)
            exchange(compressor, flat, state, transport, step=step)
        return {tensor.name: bits(flat[place]) for tensor, place in bucket.segments()}

    return InProcessCluster(2).run(one_rank)[0]


@pytest.mark.parametrize(
    ("settings", "compressed"),
    [
        ({}, ["0.weight", "1.weight", "norm.table"]),
        ({"skip": "*norm*"}, ["0.weight", "1.weight"]),
        ({"skip": "norm*|1.*"}, ["0.weight"]),
        ({"skip": "*.bias", "min_dims": 0}, ["0.weight", "norm.weight", "1.weight", "norm.table"]),
        ({"min_dims": 1, "min_numel": 20}, ["0.weight", "1.weight", "norm.table", "1.bias"]),
        ({"min_numel": 127}, ["0.weight", "1.weight"]),
        ({"skip": "Norm*"}, ["0.weight", "1.weight", "norm.table"]),
    ],
)
def test_formula(settings: dict, compressed: list[str]) -> None:
    """Each parameter is what it would be if its kind travelled alone."""
    inner = ErrorFeedback(Bf16())
    found = by_parameter(PerLayer(inner, **settings), BUCKET)
    chosen = Bucket(tuple(tensor for tensor in TENSORS if tensor.name in compressed))
    skipped = Bucket(tuple(tensor for tensor in TENSORS if tensor.name not in compressed))
    assert found == by_parameter(inner, chosen) | by_parameter(NoCompression(), skipped)


def test_rounds_share_waits() -> None:
    compressor = PerLayer(PowerSgd(rank=2), skip="*norm*")
    chosen = Bucket((TENSORS[0], TENSORS[3]))
    rounds = compressor.rounds(BUCKET, MOMENT)
    assert rounds[1:] == PowerSgd(rank=2).rounds(chosen, MOMENT)
    assert rounds[0].sizes == (4 * (BUCKET.numel - chosen.numel),)
    assert (len(rounds), compressor.num_waits(BUCKET, MOMENT)) == (3, 2)
    vectors, matrices = Bucket((TENSORS[1], TENSORS[2])), Bucket((TENSORS[0],))
    assert (len(compressor.rounds(vectors, MOMENT)), compressor.num_waits(vectors, MOMENT)) == (1, 1)
    assert (len(compressor.rounds(matrices, MOMENT)), compressor.num_waits(matrices, MOMENT)) == (2, 2)


@pytest.mark.parametrize("bucket", [BUCKET, Bucket(TENSORS[:1]), Bucket(TENSORS[1:3])], ids=["both", "all", "none"])
def test_own_is_what_this_rank_contributed(bucket: Bucket) -> None:
    def one_rank(transport: InProcessTransport) -> tuple[torch.Tensor, torch.Tensor]:
        compressor = PerLayer(Bf16())
        flat = values(transport.rank, 0, bucket.numel, bucket.dtype)
        own = torch.full_like(flat, 7.0)
        group = Everyone(transport, "a bucket")
        for work in compressor.exchange(flat, compressor.init(bucket), group, own):
            work.wait()
        return flat, own

    found = InProcessCluster(2).run(one_rank)
    total = torch.cat([(found[0][1][place] + found[1][1][place]) for _, place in bucket.segments()])
    torch.testing.assert_close(found[0][0], total, rtol=2**-7, atol=1e-6)
    assert not found[0][1].eq(7.0).any()


def test_state_is_that_of_what_is_compressed() -> None:
    inside = PerLayer(ErrorFeedback(Bf16())).init(BUCKET)
    assert set(inside.by_parameter()) == {"0.weight", "1.weight", "norm.table"}
    outside = ErrorFeedback(PerLayer(Bf16())).init(BUCKET)
    assert set(outside.by_parameter()) == {tensor.name for tensor in TENSORS}
    saved = {name: {key: value + 1 for key, value in fields.items()} for name, fields in inside.by_parameter().items()}
    inside.restore(saved)
    assert all(bool(value.eq(1).all()) for fields in inside.by_parameter().values() for value in fields.values())


def test_metrics_come_from_the_part_that_is_compressed() -> None:
    compressor = PerLayer(ErrorFeedback(Bf16()))
    state = compressor.init(BUCKET)
    state.measure = True
    exchange(compressor, values(0, 0, BUCKET.numel, BUCKET.dtype), state, InProcessCluster(1).transport(0))
    assert set(state.metrics) == {"residual_norm", "relative_error"}


def test_settings_without_effect_are_refused() -> None:
    PerLayer(Bf16(), skip="*norm*").check(TENSORS, SGD)
    with pytest.raises(AttachError, match=r'skip="\*\.bais" matches no parameter of this model.*"0\.weight"'):
        PerLayer(Bf16(), skip="*.bais").check(TENSORS, SGD)
    with pytest.raises(AttachError, match="per_layer skips all 6"):
        PerLayer(Bf16(), min_numel=1000).check(TENSORS, SGD)
    with pytest.raises(AttachError, match=r"powersgd\.rank=6 compresses no parameter"):
        PerLayer(PowerSgd(rank=6), skip="*.weight").check(TENSORS, SGD)


def test_lockstep() -> None:
    def issues(name: str, count: int, log: list[str]) -> Exchange:
        for number in range(count):
            log.append(f"{name}{number}")
            yield DoneWork()
        log.append(f"{name} ends")

    for lengths, waits in (((2, 1), 2), ((1, 3), 3), ((0, 2), 2), ((0, 0), 0)):
        log: list[str] = []
        steps = list(in_lockstep(*(issues(name, count, log) for name, count in zip("ab", lengths, strict=True))))
        assert len(steps) == waits
        assert sorted(log) == sorted(
            [f"{name}{number}" for name, count in zip("ab", lengths, strict=True) for number in range(count)]
            + ["a ends", "b ends"]
        )
        assert log[:2] == [f"{name}0" if count else f"{name} ends" for name, count in zip("ab", lengths, strict=True)]


def test_a_part_is_made_ready_for_the_same_exchange() -> None:
    state = BucketState(BUCKET, parts=[BucketState(BUCKET)], moment=MOMENT, measure=True)
    part = state.part(0)
    assert part.moment is MOMENT
    assert part.measure
    assert part.metrics is state.metrics
