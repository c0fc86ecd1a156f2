"""acpsgd: the two factors in turn, one round a step."""

from __future__ import annotations

import pytest
import torch

from laconic.compression import AcpSgd, ErrorFeedback, PowerSgd
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from tests.compression.test_laws import exchange, values

pytestmark = pytest.mark.timeout(60)
BUCKET = Bucket((TensorSpec("weight", (30, 50)), TensorSpec("bias", (7,))))


def gradient(rank: int, step: int) -> torch.Tensor:
    return values(rank, step, BUCKET.numel, torch.float32)


def projected(matrix: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """What of every row lies in the space of the columns of `basis`."""
    q, _ = torch.linalg.qr(basis.double())
    return matrix.double() @ q @ q.T


@pytest.mark.parametrize("world_size", [1, 3])
def test_formula(world_size: int) -> None:
    """Even rounds project rows on the last Q, odd ones columns on the last P; the product with the basis is kept."""
    method = AcpSgd(rank=2)

    def rank(transport: InProcessTransport) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        found, state = [], method.init(BUCKET)
        for step in range(4):
            before = state.whole["acpsgd.p" if step % 2 else "acpsgd.q"]["weight"].clone()
            flat = gradient(transport.rank, step)
            exchange(method, flat, state, transport, step=step)
            found.append((before, flat, state.whole["acpsgd.q" if step % 2 else "acpsgd.p"]["weight"].clone()))
        return found

    for step, (basis, flat, kept) in enumerate(InProcessCluster(world_size).run(rank)[0]):
        true = sum(gradient(rank, step) for rank in range(world_size))
        matrix, decoded = true[:1500].view(30, 50), flat[:1500].view(30, 50)
        expected = projected(matrix.T, basis).T if step % 2 else projected(matrix, basis.T)
        assert torch.allclose(decoded.double(), expected, atol=1e-4)
        assert torch.allclose(flat[1500:], true[1500:]), "vectors travel as they are"
        # What is kept spans the space of what was decoded, so the next round continues from it.
        again = projected(decoded, kept.T) if step % 2 else projected(decoded.T, kept).T
        assert torch.allclose(again, decoded.double(), atol=1e-4)


def test_a_matrix_of_low_rank_arrives_after_one_turn_of_both() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(30, 2, generator=generator) @ torch.randn(2, 50, generator=generator)

    def rank(transport: InProcessTransport) -> list[float]:
        method, errors = AcpSgd(rank=2), []
        state = method.init(BUCKET)
        for step in range(4):
            flat = torch.cat((matrix.reshape(-1), torch.ones(7)))
            exchange(method, flat, state, transport, step=step)
            errors.append(float((flat[:1500].view(30, 50) - matrix).norm() / matrix.norm()))
        return errors

    errors = InProcessCluster(1).run(rank)[0]
    assert errors[0] > 0.5
    assert max(errors[1:]) < 1e-4


def test_half_the_bytes_and_half_the_rounds_of_powersgd() -> None:
    both = PowerSgd().rounds(BUCKET, Moment.steady(4))
    even, odd = (AcpSgd().rounds(BUCKET, Moment(step, 0, 4, step)) for step in (0, 1))
    assert len(even) == len(odd) == 1
    # The vector travels every time.
    assert even[0].sizes[0] + odd[0].sizes[0] == sum(round.sizes[0] for round in both) + 4 * 7


def test_error_feedback_gets_what_was_lost() -> None:
    compressor = ErrorFeedback(AcpSgd(rank=1))

    def rank(transport: InProcessTransport) -> tuple[torch.Tensor, torch.Tensor]:
        state, out = compressor.init(BUCKET), torch.zeros(BUCKET.numel)
        for step in range(5):
            flat = gradient(transport.rank, step)
            exchange(compressor, flat, state, transport, step=step)
            out += flat
        return out, state.flat["error_feedback.residual"]

    (out, left), (_, right) = InProcessCluster(2).run(rank)
    put_in = sum(gradient(rank, step) for rank in range(2) for step in range(5))
    assert torch.allclose(out + left + right, put_in, atol=1e-3)
