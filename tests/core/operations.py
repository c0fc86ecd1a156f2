"""Every Transport operation once per dtype, with a few-line reference; run in-process and over Gloo alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from laconic.core.transport import Transport

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8)


def contribution(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """What `rank` brings: small whole numbers, whose sums over a few ranks are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(0, 20, shape, generator=generator).to(dtype)


@dataclass(frozen=True)
class Case:
    """One operation on one dtype: how a rank runs it, what each rank must end with, what it must be counted at."""

    label: str
    run: Callable[[Transport], torch.Tensor]
    expected: Callable[[int, int], torch.Tensor]
    """(rank, world_size) -> result"""
    operation: str
    """The key under which bytes are counted; {last} stands for the last rank."""
    sent: Callable[[int, int], int]
    """(rank, world_size) -> bytes; written out again here, not taken from laconic."""


def _all_reduce(dtype: torch.dtype, op: str, numel: int) -> Case:
    def run(transport: Transport) -> torch.Tensor:
        tensor = contribution(transport.rank, dtype, numel)
        transport.all_reduce(tensor, op=op, what="x").wait()  # type: ignore[arg-type]
        return tensor

    def expected(rank: int, world_size: int) -> torch.Tensor:
        stack = torch.stack([contribution(other, dtype, numel) for other in range(world_size)])
        return {"sum": stack.sum(0), "max": stack.amax(0), "min": stack.amin(0)}[op].to(dtype)

    def sent(rank: int, n: int) -> int:
        # Rounded up to a whole byte.
        return (2 * (n - 1) * numel * dtype.itemsize + n - 1) // n

    return Case(f"all_reduce({op}) {dtype} {numel}", run, expected, f"payload/all_reduce({op})", sent)


def _broadcast(dtype: torch.dtype, from_last: bool) -> Case:
    def source(world_size: int) -> int:
        return world_size - 1 if from_last else 0

    def run(transport: Transport) -> torch.Tensor:
        tensor = contribution(transport.rank, dtype, 5, 2)
        transport.broadcast(tensor, source=source(transport.world_size), purpose="buffers").wait()
        return tensor

    def sent(rank: int, n: int) -> int:
        # A binomial tree of at most four: the source feeds 1 and 2 places on; one place on feeds three places on.
        children = {1: [0], 2: [1, 0], 3: [2, 0, 0], 4: [2, 1, 0, 0]}[n]
        return children[(rank - source(n)) % n] * 10 * dtype.itemsize

    return Case(
        f"broadcast from {'last' if from_last else 'first'} {dtype}",
        run,
        lambda rank, n: contribution(source(n), dtype, 5, 2),
        f"buffers/broadcast({'{last}' if from_last else 0})",
        sent,
    )


def _all_gather(dtype: torch.dtype, shape: tuple[int, ...]) -> Case:
    def run(transport: Transport) -> torch.Tensor:
        output = torch.empty(transport.world_size, *shape, dtype=dtype)
        transport.all_gather(output, contribution(transport.rank, dtype, *shape), purpose="control").wait()
        return output

    return Case(
        f"all_gather {dtype} {shape}",
        run,
        lambda rank, n: torch.stack([contribution(other, dtype, *shape) for other in range(n)]),
        "control/all_gather",
        lambda rank, n: (n - 1) * torch.Size(shape).numel() * dtype.itemsize,
    )


def _reduce_scatter(dtype: torch.dtype, numel: int) -> Case:
    def run(transport: Transport) -> torch.Tensor:
        output = torch.empty(numel, dtype=dtype)
        transport.reduce_scatter(output, contribution(transport.rank, dtype, transport.world_size, numel)).wait()
        return output

    def expected(rank: int, world_size: int) -> torch.Tensor:
        given = [contribution(other, dtype, world_size, numel)[rank] for other in range(world_size)]
        return torch.stack(given).sum(0).to(dtype)

    return Case(
        f"reduce_scatter {dtype} {numel}",
        run,
        expected,
        "payload/reduce_scatter",
        lambda rank, n: (n - 1) * numel * dtype.itemsize,
    )


def _all_to_all(dtype: torch.dtype, shape: tuple[int, ...]) -> Case:
    def run(transport: Transport) -> torch.Tensor:
        output = torch.empty(transport.world_size, *shape, dtype=dtype)
        transport.all_to_all(output, contribution(transport.rank, dtype, transport.world_size, *shape)).wait()
        return output

    return Case(
        f"all_to_all {dtype} {shape}",
        run,
        lambda rank, n: torch.stack([contribution(other, dtype, n, *shape)[rank] for other in range(n)]),
        "payload/all_to_all",
        lambda rank, n: (n - 1) * torch.Size(shape).numel() * dtype.itemsize,
    )


def _ring(dtype: torch.dtype) -> Case:
    """Two tensors to the next rank, one to the previous: pairs must match in the order given per peer."""

    def run(transport: Transport) -> torch.Tensor:
        rank, n = transport.rank, transport.world_size
        if n == 1:
            transport.send_receive([], []).wait()
            return torch.empty(0, dtype=dtype)
        ahead, behind = (rank + 1) % n, (rank - 1) % n
        pieces = contribution(rank, dtype, 3, 4)
        received = torch.empty(3, 4, dtype=dtype)
        transport.send_receive(
            [(ahead, pieces[0]), (ahead, pieces[1]), (behind, pieces[2])],
            [(behind, received[0]), (behind, received[1]), (ahead, received[2])],
            what="a ring",
        ).wait()
        return received

    def expected(rank: int, n: int) -> torch.Tensor:
        if n == 1:
            return torch.empty(0, dtype=dtype)
        before, after = contribution((rank - 1) % n, dtype, 3, 4), contribution((rank + 1) % n, dtype, 3, 4)
        return torch.stack([before[0], before[1], after[2]])

    return Case(
        f"send_receive {dtype}", run, expected, "payload/send_receive", lambda rank, n: 12 * dtype.itemsize * (n > 1)
    )


def _one_way() -> Case:
    """Rank 0 only sends, the last rank only receives, the others do nothing."""

    def run(transport: Transport) -> torch.Tensor:
        last = transport.world_size - 1
        received = torch.zeros(5)
        sends = [(last, torch.arange(5.0))] if transport.rank == 0 and last else []
        receives = [(0, received)] if transport.rank == last and last else []
        transport.send_receive(sends, receives).wait()
        return received

    return Case(
        "send_receive one way",
        run,
        lambda rank, n: torch.arange(5.0) if rank == n - 1 and n > 1 else torch.zeros(5),
        "payload/send_receive",
        lambda rank, n: 20 if rank == 0 and n > 1 else 0,
    )


CASES: tuple[Case, ...] = (
    *(_all_reduce(dtype, op, 11) for dtype in DTYPES for op in ("sum", "max", "min")),
    *(_all_reduce(torch.float32, "sum", numel) for numel in (0, 1, 10_007)),
    *(_broadcast(dtype, from_last) for dtype in DTYPES for from_last in (False, True)),
    *(_all_gather(dtype, (3, 5)) for dtype in DTYPES),
    _all_gather(torch.int64, ()),
    *(_reduce_scatter(dtype, 7) for dtype in DTYPES),
    *(_all_to_all(dtype, (3, 2)) for dtype in DTYPES),
    # Large rows go as messages over Gloo.
    _reduce_scatter(torch.float32, 70_000),
    *(_all_to_all(dtype, (70_000, 8 // dtype.itemsize)) for dtype in DTYPES),
    *(_ring(dtype) for dtype in DTYPES),
    _one_way(),
)
