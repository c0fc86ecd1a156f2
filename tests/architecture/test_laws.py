"""What every registered architecture promises to a compressor, and that its prices are what is counted."""

from __future__ import annotations

import pytest
import torch

from laconic.architecture import ARCHITECTURES, AllReduce, Architecture
from laconic.core.exchange import Round
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.transport import DoneWork, Traffic
from tests.strategy.generate import variants

pytestmark = pytest.mark.timeout(30)
SIZES = (0, 1, 7, 7919)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

every_architecture = pytest.mark.parametrize("architecture", variants("architecture"), ids=str)
every_world_size = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


def contribution(rank: int, index: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + index)
    return torch.randint(-50, 50, (numel,), generator=generator).to(dtype)


@every_world_size
@every_architecture
def test_sum(architecture: Architecture, world_size: int) -> None:
    for dtype in DTYPES:

        def rank(transport: InProcessTransport, dtype: torch.dtype = dtype) -> tuple[list[torch.Tensor], int]:
            group = architecture.group(transport, "a bucket")
            assert group.size == world_size
            tensors = [contribution(transport.rank, index, numel, dtype) for index, numel in enumerate(SIZES)]
            work = group.sum(tuple(tensors))
            work.wait()
            assert work.done()
            return tensors, transport.traffic.sent_bytes("payload")

        predicted = sum(architecture.sent_bytes(Round("sum", (numel * dtype.itemsize,)), world_size) for numel in SIZES)
        for tensors, sent in InProcessCluster(world_size).run(rank):
            assert sent == predicted
            for index, (numel, tensor) in enumerate(zip(SIZES, tensors, strict=True)):
                expected = sum(contribution(other, index, numel, dtype) for other in range(world_size))
                assert torch.equal(tensor, expected)


@every_world_size
@every_architecture
def test_gather(architecture: Architecture, world_size: int) -> None:
    for dtype in (*DTYPES, torch.int64, torch.uint8):
        for numel in SIZES:

            def rank(
                transport: InProcessTransport, numel: int = numel, dtype: torch.dtype = dtype
            ) -> tuple[torch.Tensor, int]:
                mine = contribution(transport.rank, 0, numel, dtype)
                work, rows = architecture.group(transport, "a bucket").gather(mine)
                work.wait()
                assert torch.equal(mine, contribution(transport.rank, 0, numel, dtype))
                return rows, transport.traffic.sent_bytes("payload")

            predicted = architecture.sent_bytes(Round("gather", (numel * dtype.itemsize,)), world_size)
            for rows, sent in InProcessCluster(world_size).run(rank):
                assert sent == predicted
                assert rows.shape == (world_size, numel)
                for other in range(world_size):
                    assert torch.equal(rows[other], contribution(other, 0, numel, dtype))


@every_architecture
def test_one_rank_sends_nothing(architecture: Architecture) -> None:
    assert architecture.sent_bytes(Round("sum", (10**9,)), 1) == 0
    assert architecture.sent_bytes(Round("gather", (10**9,)), 1) == 0


def test_all_reduce_costs() -> None:
    assert AllReduce().sent_bytes(Round("sum", (1000,)), 4) == 1500
    assert AllReduce().sent_bytes(Round("sum", (1000,)), 3) == 1334, "2 * 2/3 * 1000 rounded up"
    assert AllReduce().sent_bytes(Round("gather", (1000,)), 4) == 3000


class Recorder:
    """A transport that only takes notes."""

    rank, world_size = 0, 2

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.calls: list[tuple[str, str]] = []

    def all_reduce(self, tensor: torch.Tensor, *, what: str = "", **rest: object) -> DoneWork:
        self.calls.append(("all_reduce", what))
        return DoneWork()

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, what: str = "", **rest: object) -> DoneWork:
        self.calls.append(("all_gather", what))
        return DoneWork()


@pytest.mark.parametrize("method", list(ARCHITECTURES))
def test_operations_say_what_they_carry(method: type[Architecture]) -> None:
    recorder = Recorder()
    group = method().group(recorder, "bucket 3 of 7")  # type: ignore[arg-type]
    group.sum((torch.ones(2), torch.ones(3))).wait()
    group.gather(torch.ones(2))[0].wait()
    assert recorder.calls
    assert all(what == "bucket 3 of 7" for _, what in recorder.calls)
