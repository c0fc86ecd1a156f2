"""As it is for the first steps, then as the wrapped method does."""

from __future__ import annotations

import pytest
import torch

import laconic
from laconic.compression import Bf16, Compressor, ErrorFeedback, NoCompression, PowerSgd, Warmup
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from tests.compression.test_laws import bits, exchange, values
from tests.runtime.replicas import mlp, mlp_loss, sgd

BUCKET = Bucket((TensorSpec("weight", (12, 20)), TensorSpec("bias", (12,))))


def results(compressor: Compressor, steps: range, world_size: int = 3) -> list[bytes]:
    """What rank 0 holds after each step, with a fresh state at the first."""

    def one_rank(transport: InProcessTransport) -> list[bytes]:
        state, found = compressor.init(BUCKET), []
        for step in steps:
            flat = values(transport.rank, step, BUCKET.numel, BUCKET.dtype)
            exchange(compressor, flat, state, transport, step=step)
            found.append(bits(flat))
        return found

    return InProcessCluster(world_size).run(one_rank)[0]


@pytest.mark.parametrize("inner", [Bf16(), PowerSgd(rank=2), ErrorFeedback(PowerSgd(rank=2))], ids=str)
def test_formula(inner: Compressor) -> None:
    found = results(Warmup(inner, steps=3), range(6))
    assert found[:3] == results(NoCompression(), range(3))
    assert found[3:] == results(inner, range(3, 6)), "what is inside has not seen the first steps"


def test_nothing_is_lost_before_it_ends() -> None:
    compressor = ErrorFeedback(Warmup(PowerSgd(rank=2), steps=2))

    def one_rank(transport: InProcessTransport) -> list[bool]:
        state, lost = compressor.init(BUCKET), []
        for step in range(4):
            flat = values(transport.rank, step, BUCKET.numel, BUCKET.dtype)
            exchange(compressor, flat, state, transport, step=step)
            lost.append(bool(state.flat["error_feedback.residual"].any()))
        return lost

    assert InProcessCluster(2).run(one_rank) == [[False, False, True, True]] * 2


def test_rounds_and_waits_depend_on_the_step() -> None:
    compressor = Warmup(PowerSgd(rank=2), steps=5)
    for step, inner in ((4, NoCompression()), (5, PowerSgd(rank=2)), (2**31, PowerSgd(rank=2))):
        moment = Moment(step, 0, 2)
        assert compressor.rounds(BUCKET, moment) == inner.rounds(BUCKET, moment)
        assert compressor.num_waits(BUCKET, moment) == inner.num_waits(BUCKET, moment)


def test_bytes_of_a_session_change_when_it_ends_and_a_resumed_one_remembers() -> None:
    strategy = "bsp / all_reduce / bf16 + warmup(steps=2) / fusion"

    def one_rank(transport: InProcessTransport) -> list[int]:
        model = mlp()
        optimizer = sgd(model)
        counted: list[int] = []

        def steps(session: laconic.Session, first: int, last: int) -> None:
            for step in range(first, last):
                before, predicted = session.traffic.sent_bytes("payload"), session.predicted_bytes_per_step()
                mlp_loss(model, step, transport.rank).backward()
                counted.append(session.traffic.sent_bytes("payload") - before)
                assert counted[-1] == predicted
                optimizer.step()
                optimizer.zero_grad()

        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            steps(session, 0, 4)
            saved = session.state_dict()
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            session.load_state_dict(saved)
            steps(session, 4, 5)
        return counted

    counted = laconic.InProcessCluster(2).run(one_rank)[0]
    full = 4 * sum(parameter.numel() for parameter in mlp().parameters())
    assert counted == [full, full, full // 2, full // 2, full // 2]


def test_dtypes_are_sent_as_they_are() -> None:
    bucket = Bucket((TensorSpec("weight", (12, 20), torch.float64),))
    assert Warmup(Bf16(), steps=1).rounds(bucket, Moment())[0].sizes == (8 * 240,)
