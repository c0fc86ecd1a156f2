"""P = orth(M Q), Q = M^T P, decoded = P Q^T: against numpy over several steps, and what it must survive."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import laconic
from laconic.architecture.all_reduce import Everyone
from laconic.compression import ErrorFeedback, NoCompression, PowerSgd
from laconic.compression.families.low_rank import random_matrix
from laconic.compression.kernels.lowrank import orthonormal
from laconic.core.exchange import Round
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.optimizer_facts import OptimizerFacts
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.tensor import TensorSpec
from laconic.errors import AttachError
from tests.compression.test_laws import bits, exchange, values
from tests.processes import run_processes
from tests.runtime.replicas import assert_equal, mlp, sgd

MATRICES = {"first.weight": (20, 30), "conv": (20, 5, 3, 2), "last.weight": (9, 40)}
BUCKET = Bucket(
    (
        TensorSpec("first.bias", (20,)),
        TensorSpec("first.weight", MATRICES["first.weight"]),
        TensorSpec("tiny", (2, 2)),
        TensorSpec("scale", ()),
        TensorSpec("conv", MATRICES["conv"]),
        TensorSpec("nothing", (0, 5)),
        TensorSpec("last.weight", MATRICES["last.weight"]),
    )
)
CPU = torch.device("cpu")
SGD = OptimizerFacts(name="SGD")


def one(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Bucket:
    return Bucket((TensorSpec("weight", shape, dtype),))


def alone(compressor: PowerSgd | ErrorFeedback, matrix: torch.Tensor, state: BucketState) -> torch.Tensor:
    """One exchange of one matrix on one rank."""
    flat = matrix.reshape(-1).clone()
    exchange(compressor, flat, state, InProcessCluster(1).transport(0))
    return flat.view(matrix.shape)


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_formula_with_error_feedback(world_size: int, rank: int) -> None:
    """n simulated workers in float64, with numpy's own QR; bases may be turned, what is decoded may not."""
    compressor, steps = ErrorFeedback(PowerSgd(rank=rank)), 6
    start = PowerSgd(rank=rank).init(BUCKET).whole["powersgd.q"]

    def one_rank(transport: InProcessTransport) -> list[tuple[np.ndarray, np.ndarray]]:
        state, found = compressor.init(BUCKET), []
        for step in range(steps):
            flat = values(transport.rank, step, BUCKET.numel, BUCKET.dtype)
            exchange(compressor, flat, state, transport, step=step)
            found.append((flat.numpy().copy(), state.flat["error_feedback.residual"].numpy().copy()))
        return found

    found = InProcessCluster(world_size).run(one_rank)
    error = [np.zeros(BUCKET.numel) for _ in range(world_size)]
    q = {name: value.double().numpy().T for name, value in start.items()}
    for step in range(steps):
        gradients = [
            values(other, step, BUCKET.numel, torch.float64).numpy() + error[other] for other in range(world_size)
        ]
        decoded, error = sum(gradients), [np.zeros(BUCKET.numel) for _ in gradients]
        for tensor, place in BUCKET.segments():
            if tensor.name in MATRICES:
                parts = [gradient[place].reshape(tensor.shape[0], -1) for gradient in gradients]
                p = np.linalg.qr(sum(part @ q[tensor.name] for part in parts))[0]
                q[tensor.name] = sum(part.T @ p for part in parts)
                decoded[place] = (p @ q[tensor.name].T).ravel()
                for kept, part in zip(error, parts, strict=True):
                    kept[place] = (part - p @ (part.T @ p).T).ravel()
        for other, results in enumerate(found):
            np.testing.assert_allclose(results[step][0], decoded, atol=2e-5, err_msg=f"result, step {step}")
            np.testing.assert_allclose(results[step][1], error[other], atol=2e-5, err_msg=f"residual, step {step}")


def test_bytes_and_rounds() -> None:
    compressor = PowerSgd(rank=2)
    plain = 20 + 4 + 1
    tall, wide = 2 * (20 + 20 + 9), 2 * (30 + 30 + 40)
    assert compressor.rounds(BUCKET, Moment()) == (Round("sum", (4 * (plain + tall),)), Round("sum", (4 * wide,)))
    vectors = Bucket((TensorSpec("bias", (20,)), TensorSpec("scale", ())))
    assert compressor.rounds(vectors, Moment()) == (Round("sum", (84,)),), "nothing to compress: one round"
    for dtype, size in ((torch.float16, 4), (torch.bfloat16, 4), (torch.float64, 8)):
        assert compressor.rounds(one((10, 10), dtype), Moment())[1] == Round("sum", (size * 20,))


def test_what_would_not_get_smaller_is_sent_as_it_is() -> None:
    # 2 * (4 + 4) = 4 * 4: two thin matrices would be as large.
    bucket = Bucket((TensorSpec("square", (4, 4)), TensorSpec("wide", (4, 5)), TensorSpec("bias", (7,))))
    assert list(PowerSgd(rank=2).init(bucket).whole["powersgd.q"]) == ["wide"]

    def one_rank(transport: InProcessTransport) -> torch.Tensor:
        flat = values(transport.rank, 0, bucket.numel, bucket.dtype)
        exchange(PowerSgd(rank=2), flat, PowerSgd(rank=2).init(bucket), transport)
        return flat

    def plainly(transport: InProcessTransport) -> torch.Tensor:
        flat = values(transport.rank, 0, bucket.numel, bucket.dtype)
        exchange(NoCompression(), flat, NoCompression().init(bucket), transport)
        return flat

    found, expected = InProcessCluster(3).run(one_rank)[0], InProcessCluster(3).run(plainly)[0]
    for tensor, place in bucket.segments():
        assert torch.equal(found[place], expected[place]) == (tensor.name != "wide")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_own_contributions_add_up_to_what_is_decoded(world_size: int) -> None:
    def one_rank(transport: InProcessTransport) -> tuple[torch.Tensor, torch.Tensor]:
        compressor = PowerSgd(rank=2)
        state = compressor.init(BUCKET)
        flat = values(transport.rank, 0, BUCKET.numel, BUCKET.dtype)
        own = torch.full_like(flat, 7.0)
        for work in compressor.exchange(flat, state, Everyone(transport, "a bucket"), own):
            work.wait()
        return flat, own

    found = InProcessCluster(world_size).run(one_rank)
    torch.testing.assert_close(sum(own for _, own in found), found[0][0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("true_rank", [0, 1, 2, 4])
def test_matrices_of_low_rank_arrive_whole(true_rank: int) -> None:
    generator = torch.Generator().manual_seed(3)
    left, right = torch.randn(50, true_rank, generator=generator), torch.randn(true_rank, 70, generator=generator)
    matrix, compressor = left @ right, PowerSgd(rank=4)
    state = compressor.init(one((50, 70)))
    for _ in range(3):
        torch.testing.assert_close(alone(compressor, matrix, state), matrix, atol=2e-5, rtol=1e-5)


def test_warm_start_finds_the_best_approximation() -> None:
    matrix = values(0, 0, 40 * 60, torch.float32).view(40, 60)
    singular = torch.linalg.svdvals(matrix.double())
    best = singular[3:].square().sum().sqrt()
    state = PowerSgd(rank=3).init(one((40, 60)))
    errors = [torch.linalg.norm(alone(PowerSgd(rank=3), matrix, state).double() - matrix) / best for _ in range(60)]
    assert errors[0] > 1.05
    assert errors[-1] < 1.01


def test_a_direction_that_was_lost_comes_back() -> None:
    """After a zero gradient, and after one of low rank, a matrix of full rank is approximated as well as ever."""
    matrix = values(0, 0, 30 * 30, torch.float32).view(30, 30)
    for earlier in (torch.zeros(30, 30), torch.ones(30, 30), torch.eye(30)[:, :1] @ torch.ones(1, 30)):
        compressor = PowerSgd(rank=4)
        state, fresh = compressor.init(one((30, 30))), compressor.init(one((30, 30)))
        for _ in range(3):
            torch.testing.assert_close(alone(compressor, earlier, state), earlier, atol=1e-5, rtol=1e-5)
        for _ in range(20):
            found, expected = alone(compressor, matrix, state), alone(compressor, matrix, fresh)
        assert torch.linalg.norm(found - matrix) < 1.02 * torch.linalg.norm(expected - matrix)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_seen_by_all_and_not_remembered(bad: float) -> None:
    compressor, bucket = ErrorFeedback(PowerSgd(rank=2)), one((10, 12))

    def one_rank(transport: InProcessTransport) -> list[torch.Tensor]:
        state, found = compressor.init(bucket), []
        for step in range(3):
            flat = values(transport.rank, step, bucket.numel, bucket.dtype)
            if transport.rank == 1 and step == 1:
                flat[17] = bad
            exchange(compressor, flat, state, transport, step=step)
            found.append(flat)
        assert all(value.isfinite().all() for fields in state.by_parameter().values() for value in fields.values())
        return found

    for results in InProcessCluster(3).run(one_rank):
        assert [bool(result.isfinite().all()) for result in results] == [True, False, True]
        assert not results[1].view(10, 12)[:, 17 % 12].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    matrix = (values(0, 0, 20, torch.float64).view(20, 1) @ values(1, 0, 30, torch.float64).view(1, 30)).to(dtype)
    compressor = PowerSgd(rank=2)
    state = compressor.init(one((20, 30), dtype))
    assert state.whole["powersgd.q"]["weight"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    found = alone(compressor, matrix, state)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), matrix.double(), atol=20 * torch.finfo(dtype).eps, rtol=0)


def test_the_first_q_depends_on_the_name_alone() -> None:
    starts = PowerSgd().init(BUCKET).whole["powersgd.q"]
    again = PowerSgd().init(Bucket((BUCKET.tensors[4], BUCKET.tensors[1]))).whole["powersgd.q"]
    assert {name: bits(q) for name, q in again.items()} == {name: bits(starts[name]) for name in again}
    assert not torch.equal(starts["conv"], starts["first.weight"])


@pytest.mark.parametrize("rank", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("rows", [2, 70, 3000])
def test_orthonormal(rows: int, rank: int) -> None:
    """Orthonormal whatever the columns are, and spanning them."""
    rows = max(rows, rank + 1)
    noise = random_matrix(rows, (rows, rank), torch.float32, CPU)
    generator = torch.Generator().manual_seed(rows)
    full = torch.randn(3, rows, rank, generator=generator)
    for columns in (
        full,
        full * 10.0 ** -torch.linspace(0, 6, rank),
        full[..., :1].expand_as(full),
        full * (torch.arange(rows) < 2).unsqueeze(-1),
        full * 1e-30,
        full * 1e30,
        torch.zeros_like(full),
    ):
        basis = orthonormal(columns, noise).double()
        torch.testing.assert_close(basis.mT @ basis, torch.eye(rank).double().expand(3, -1, -1), atol=1e-6, rtol=0)
        missed = torch.linalg.norm(columns - basis @ (basis.mT @ columns.double()))
        assert missed <= 2e-6 * torch.linalg.norm(columns.double())


def test_a_rank_without_effect_is_refused() -> None:
    specs = [TensorSpec("big", (12, 24)), TensorSpec("small", (3, 3)), TensorSpec("bias", (100,))]
    PowerSgd(rank=7).check(specs, SGD)
    with pytest.raises(AttachError, match=r'rank=8 compresses no parameter.*at most 7, which compresses "big"'):
        PowerSgd(rank=8).check(specs, SGD)
    with pytest.raises(
        AttachError,
        match=r"no parameter is a matrix with more values .* of rank 1 would have\. Use another",
    ):
        PowerSgd(rank=1).check(specs[2:], SGD)

    def one_rank(transport: InProcessTransport) -> None:
        model = mlp()
        laconic.attach(model, sgd(model), "bsp / all_reduce / powersgd + error_feedback", transport=transport)

    with pytest.raises(AttachError, match="Use a rank of at most 2, "):
        laconic.InProcessCluster(1).run(one_rank)


@pytest.mark.slow
@pytest.mark.dist
def test_many_buckets_in_flight_over_gloo() -> None:
    results = run_processes("tests.compression.gloo_ranks:trains_with_powersgd", world_size=2)
    for result in results:
        value = result.value
        assert value["num_buckets"] > 10
        assert value["counted"] == value["predicted"] > 0
        assert value["losses"][-1] < 0.5 * value["losses"][0]
        assert_equal(value["state"], results[0].value["state"])
