"""power_gossip against differences that are written out, though no rank ever has one of them."""

from __future__ import annotations

import pytest
import torch

from laconic.architecture import PowerGossip
from laconic.compression import AcpSgd, Compressor, PowerSgd, RandomK
from laconic.core.exchange import Wire
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.tensor import TensorSpec

pytestmark = pytest.mark.timeout(60)
ROWS, COLUMNS, BIAS = 9, 7, 5
BUCKET = Bucket((TensorSpec("matrix", (ROWS, COLUMNS), torch.float64), TensorSpec("bias", (BIAS,), torch.float64)))


def start(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return 3 + torch.randn(BUCKET.numel, generator=generator, dtype=torch.float64)


def begun(compression: Compressor) -> BucketState:
    architecture, state = PowerGossip(), PowerGossip().init(compression, BUCKET)
    architecture.begin(state, torch.zeros(BUCKET.numel, dtype=torch.float64))
    return state


def mixed(compression: Compressor, workers: int, rounds: int, topology: str = "ring") -> list[torch.Tensor]:
    """What every rank holds after so many rounds; every round is counted, and waits as often as it says."""
    architecture = PowerGossip(topology=topology)

    def one_rank(transport: InProcessTransport) -> torch.Tensor:
        state, flat = architecture.init(compression, BUCKET), start(transport.rank)
        architecture.begin(state, flat)
        for round in range(rounds):
            state.moment = Moment(round, transport.rank, workers, round)
            before, waits = transport.traffic.sent_bytes("payload"), 0
            for work in architecture.exchange(flat, state, compression, Wire(transport, "a bucket")):
                waits += 1
                work.wait()
            sent = transport.traffic.sent_bytes("payload") - before
            assert sent == architecture.sent_bytes(BUCKET, compression, state.moment)
            assert waits == architecture.num_waits(BUCKET, compression, state.moment)
        return flat

    return InProcessCluster(workers).run(one_rank)


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("rank", [1, 2])
def test_powersgd_of_every_difference(workers: int, rank: int) -> None:
    """P = orth(D Q), x_i <- x_i - W_ij P P^T D, Q <- D^T P, for each edge of the ring by itself."""
    x = [start(worker) for worker in range(workers)]
    first = begun(PowerSgd(rank=rank)).whole["powersgd.q|0"]["matrix"].T
    edges = sorted({tuple(sorted((worker, (worker + 1) % workers))) for worker in range(workers)})
    q = dict.fromkeys(edges, first)
    weight = 1 / 2 if workers == 2 else 1 / 3
    for _ in range(6):
        moves = [torch.zeros_like(values) for values in x]
        for low, high in edges:
            difference = x[low] - x[high]
            matrix = difference[: ROWS * COLUMNS].view(ROWS, COLUMNS)
            p, _ = torch.linalg.qr(matrix @ q[low, high])
            q[low, high] = matrix.T @ p
            applied = torch.cat([(p @ p.T @ matrix).flatten(), difference[ROWS * COLUMNS :]])
            moves[low] -= weight * applied
            moves[high] += weight * applied
        x = [values + move for values, move in zip(x, moves, strict=True)]
    for found, expected in zip(mixed(PowerSgd(rank=rank), workers, 6), x, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("compression", "topology"), [(PowerSgd(rank=1), "ring"), (AcpSgd(rank=1), "torus"), (RandomK(density=0.2), "ring")]
)
def test_replicas_come_to_the_mean_of_all(compression: Compressor, topology: str) -> None:
    mean = torch.stack([start(worker) for worker in range(4)]).mean(0)
    for found in mixed(compression, 4, 150, topology):
        torch.testing.assert_close(found, mean, rtol=1e-6, atol=1e-6)


def test_bytes_of_a_matrix_and_a_vector() -> None:
    """Rank 2: (9 + 7) * 2 values of the matrix and 5 of the vector, to two neighbours, as float64."""
    assert PowerGossip().sent_bytes(BUCKET, PowerSgd(rank=2), Moment.steady(6)) == 2 * 8 * (2 * (ROWS + COLUMNS) + BIAS)


def test_every_pair_remembers_a_start_of_its_own() -> None:
    state = begun(PowerSgd(rank=1))
    assert set(state.whole) == {"powersgd.q|0", "powersgd.q|1"}
    PowerGossip().begin(state, torch.zeros(BUCKET.numel, dtype=torch.float64))
    assert set(state.whole) == {"powersgd.q|0", "powersgd.q|1"}, "to begin again changes nothing"
