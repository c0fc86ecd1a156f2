"""What every registered architecture promises about one exchange of a bucket; its prices are what is counted."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from laconic.architecture import ARCHITECTURES, AllReduce, Architecture, Choco
from laconic.architecture.all_reduce import Everyone, round_sent
from laconic.compression import Compressor, Int4, NoCompression, PowerSgd, TopK
from laconic.core.exchange import Round, Wire
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.tensor import TensorSpec
from laconic.core.transport import DoneWork, Traffic, Transport
from tests.strategy.generate import variants

pytestmark = pytest.mark.timeout(60)
SIZES = (0, 1, 7, 7919)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Of numbers about 1, after a few roundings."""


# Servers are processes, shards have other laws, and datagrams need a runtime: all three have tests of their own.
def has_own_tests(method: Architecture) -> bool:
    return method.has_servers or method.holds_shards or method.loss_bound is not None


ALL = [m for m in variants("architecture") if isinstance(m, Architecture) and not has_own_tests(m)]
every_architecture = pytest.mark.parametrize("architecture", ALL, ids=str)
every_world_size = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def two_tensors(numel: int, dtype: torch.dtype) -> Bucket:
    return Bucket((TensorSpec("first", (numel // 3,), dtype), TensorSpec("second", (numel - numel // 3,), dtype)))


def begun(architecture: Architecture, compression: Compressor, bucket: Bucket) -> BucketState:
    """The state of replicas that all start from zero."""
    state = compression.init(bucket)
    architecture.begin(state, torch.zeros(bucket.numel, dtype=bucket.dtype))
    return state


def exchange(
    architecture: Architecture,
    compression: Compressor,
    flat: torch.Tensor,
    state: BucketState,
    transport: Transport,
    *,
    round: int = 0,
) -> int:
    """One exchange, whose number of waits and bytes are checked; returns the bytes."""
    state.moment = Moment(round, transport.rank, transport.world_size, round)
    before, waits = transport.traffic.sent_bytes("payload"), 0
    for work in architecture.exchange(flat, state, compression, Wire(transport, "a bucket")):
        work.wait()
        assert work.done()
        waits += 1
    sent = transport.traffic.sent_bytes("payload") - before
    assert waits == architecture.num_waits(state.bucket, compression, state.moment)
    assert sent == architecture.sent_bytes(state.bucket, compression, state.moment)
    return sent


def weight(state: BucketState) -> float:
    """How much of the whole a replica stands for."""
    counted = [value for field, held in state.whole.items() if field.endswith(".weight") for value in held.values()]
    assert len({value.item() for value in counted}) <= 1, "one number for all parameters"
    return counted[0].item() if counted else 1.0


@every_world_size
@every_architecture
def test_means(architecture: Architecture, world_size: int) -> None:
    """With everyone: the mean of all. With neighbours: something between what is mixed, and the mean of all stays."""
    for dtype, numel in [*((torch.float32, numel) for numel in SIZES), *((dtype, 1001) for dtype in DTYPES)]:
        bucket = two_tensors(numel, dtype)

        def rank(transport: InProcessTransport, bucket: Bucket = bucket) -> list[tuple[torch.Tensor, float]]:
            state = begun(architecture, NoCompression(), bucket)
            flat = values(transport.rank, bucket.numel, bucket.dtype) * architecture.share(world_size)
            found = []
            for round in range(1 if architecture.scope == "everyone" else 4):
                memory = flat.data_ptr()
                exchange(architecture, NoCompression(), flat, state, transport, round=round)
                assert flat.data_ptr() == memory
                assert flat.dtype == bucket.dtype
                found.append((flat.double().clone(), weight(state)))
            return found

        contributions = torch.stack([values(other, numel, dtype).double() for other in range(world_size)])
        mean, near = contributions.mean(0), TOLERANCES[dtype]
        replicas = InProcessCluster(world_size).run(rank)
        for after_round in zip(*replicas, strict=True):
            if architecture.scope == "everyone":
                for flat, _ in after_round:
                    assert torch.equal(flat, after_round[0][0])
                    torch.testing.assert_close(flat, mean, rtol=near, atol=near)
                continue
            assert math.isclose(sum(part for _, part in after_round), world_size)
            whole = sum(part * flat for flat, part in after_round) / world_size
            torch.testing.assert_close(whole, mean, rtol=near, atol=near)
            for flat, _ in after_round:
                assert bool((flat <= contributions.amax(0) + near).all())
                assert bool((flat >= contributions.amin(0) - near).all())


@every_world_size
@every_architecture
def test_replicas_come_to_the_mean(architecture: Architecture, world_size: int) -> None:
    def rank(transport: InProcessTransport) -> torch.Tensor:
        bucket = two_tensors(30, torch.float64)
        state = begun(architecture, NoCompression(), bucket)
        flat = values(transport.rank, 30, torch.float64) * architecture.share(world_size)
        for round in range(1 if architecture.scope == "everyone" else 200):
            exchange(architecture, NoCompression(), flat, state, transport, round=round)
        return flat

    mean = torch.stack([values(other, 30, torch.float64) for other in range(world_size)]).mean(0)
    for flat in InProcessCluster(world_size).run(rank):
        torch.testing.assert_close(flat, mean, rtol=1e-6, atol=1e-6)


@every_architecture
def test_equal_replicas_stay_as_they_are(architecture: Architecture) -> None:
    def rank(transport: InProcessTransport) -> None:
        bucket = two_tensors(100, torch.float32)
        state = NoCompression().init(bucket)
        same = values(0, 100, torch.float32)
        architecture.begin(state, same.clone())
        for round in range(5):
            flat = same * architecture.share(3)
            exchange(architecture, NoCompression(), flat, state, transport, round=round)
            torch.testing.assert_close(flat, same)

    InProcessCluster(3).run(rank)


@pytest.mark.slow
@pytest.mark.parametrize("compression", [TopK(density=0.1), Int4(), TopK(density=0.1, route="scatter")], ids=str)
@pytest.mark.parametrize("architecture", [method for method in ALL if method.compensates], ids=str)
def test_what_a_compressor_loses_is_made_up_for(architecture: Architecture, compression: Compressor) -> None:
    """Bytes and waits are as declared; all come to the mean of all, and that stays."""
    architecture = dataclasses.replace(architecture, gamma=0.15)  # type: ignore[call-arg]  # a tenth is sent

    def rank(transport: InProcessTransport) -> torch.Tensor:
        bucket = two_tensors(60, torch.float32)
        state = begun(architecture, compression, bucket)
        flat = values(transport.rank, 60, torch.float32)
        for round in range(150):
            sent = exchange(architecture, compression, flat, state, transport, round=round)
            assert sent < 60 * 4 * len(architecture.neighbours(state.moment).sends)  # type: ignore[attr-defined]
        return flat

    mean = torch.stack([values(other, 60, torch.float32) for other in range(4)]).mean(0)
    found = torch.stack(InProcessCluster(4).run(rank))
    torch.testing.assert_close(found.mean(0), mean, rtol=1e-4, atol=1e-4)
    apart = torch.stack([values(other, 60, torch.float32) for other in range(4)]) - mean
    assert (found - mean).norm() < 0.1 * apart.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_sum_of_public_copies_stays_what_it_is(dtype: torch.dtype) -> None:
    """Each replica adds up corrections alone; if roundings added up too, replicas would be drawn away for ever."""
    bucket, world_size = two_tensors(60, dtype), 4
    architecture, compression = Choco(), TopK(density=0.1)

    def rank(transport: InProcessTransport) -> tuple[torch.Tensor, torch.Tensor]:
        state = begun(architecture, compression, bucket)
        flat = values(0, 60, dtype)
        for round in range(40):
            flat += 0.02 * values(transport.rank + 10 * round, 60, dtype)
            exchange(architecture, compression, flat, state, transport, round=round)
        return state.flat["choco.public"].double(), state.flat["choco.around"].double()

    replicas = InProcessCluster(world_size).run(rank)
    for place, (_, around) in enumerate(replicas):
        neighbours = [(place + step) % world_size for step in (-1, 0, 1)]
        torch.testing.assert_close(around, sum(replicas[other][0] for other in neighbours) / 3, rtol=1e-5, atol=1e-5)


@every_architecture
def test_one_rank_sends_nothing(architecture: Architecture) -> None:
    bucket = Bucket((TensorSpec("large", (10**9,)),))
    assert architecture.sent_bytes(bucket, NoCompression(), Moment.steady(1)) == 0


@every_architecture
def test_fields_are_declared(architecture: Architecture) -> None:
    """What is remembered carries its owner's name and says what becomes of it when the number of workers changes."""
    state = BucketState(two_tensors(10, torch.float32))
    architecture.begin(state, torch.ones(10))
    assert set(architecture.fields) == {*state.flat, *state.whole}
    assert all(field.startswith(f"{architecture.name}.") for field in architecture.fields)


def contribution(rank: int, index: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + index)
    return torch.randint(-50, 50, (numel,), generator=generator).to(dtype)


@every_world_size
def test_a_group_of_everyone_sums(world_size: int) -> None:
    for dtype in DTYPES:

        def rank(transport: InProcessTransport, dtype: torch.dtype = dtype) -> tuple[list[torch.Tensor], int]:
            group = Everyone(transport, "a bucket")
            assert group.size == world_size
            tensors = [contribution(transport.rank, index, numel, dtype) for index, numel in enumerate(SIZES)]
            work = group.sum(tuple(tensors))
            work.wait()
            assert work.done()
            return tensors, transport.traffic.sent_bytes("payload")

        predicted = sum(round_sent(Round("sum", (numel * dtype.itemsize,)), world_size) for numel in SIZES)
        for tensors, sent in InProcessCluster(world_size).run(rank):
            assert sent == predicted
            for index, (numel, tensor) in enumerate(zip(SIZES, tensors, strict=True)):
                expected = sum(contribution(other, index, numel, dtype) for other in range(world_size))
                assert torch.equal(tensor, expected)


@every_world_size
def test_a_group_of_everyone_gathers(world_size: int) -> None:
    for dtype in (*DTYPES, torch.int64, torch.uint8):
        for numel in SIZES:

            def rank(
                transport: InProcessTransport, numel: int = numel, dtype: torch.dtype = dtype
            ) -> tuple[torch.Tensor, int]:
                mine = contribution(transport.rank, 0, numel, dtype)
                work, rows = Everyone(transport, "a bucket").gather(mine)
                work.wait()
                assert torch.equal(mine, contribution(transport.rank, 0, numel, dtype))
                return rows, transport.traffic.sent_bytes("payload")

            predicted = round_sent(Round("gather", (numel * dtype.itemsize,)), world_size)
            for rows, sent in InProcessCluster(world_size).run(rank):
                assert sent == predicted
                assert rows.shape == (world_size, numel)
                for other in range(world_size):
                    assert torch.equal(rows[other], contribution(other, 0, numel, dtype))


def test_all_reduce_costs() -> None:
    assert round_sent(Round("sum", (1000,)), 4) == 1500
    assert round_sent(Round("sum", (1000,)), 3) == 1334, "2 * 2/3 * 1000 rounded up"
    assert round_sent(Round("gather", (1000,)), 4) == 3000
    bucket = Bucket((TensorSpec("w", (250,)),))
    assert AllReduce().sent_bytes(bucket, NoCompression(), Moment(0, 0, 4)) == 1500


class Recorder:
    """A transport that only takes notes."""

    rank, world_size = 0, 2

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.calls: list[str] = []

    def __getattr__(self, operation: str) -> object:
        def noted(*tensors: object, what: str = "", **rest: object) -> DoneWork:
            self.calls.append(what)
            return DoneWork()

        return noted


@pytest.mark.parametrize("method", [one for one in ARCHITECTURES if not has_own_tests(one())])
def test_operations_say_what_they_carry(method: type[Architecture]) -> None:
    for compression in (NoCompression(), PowerSgd() if method.adds_differences else TopK()):
        recorder, bucket = Recorder(), two_tensors(10, torch.float32)
        state = begun(method(), compression, bucket)
        state.moment = Moment(0, 0, 2)
        wire = Wire(recorder, "bucket 3 of 7")  # type: ignore[arg-type]
        next(method().exchange(torch.ones(10), state, compression, wire)).wait()
        assert recorder.calls
        assert set(recorder.calls) == {"bucket 3 of 7"}
