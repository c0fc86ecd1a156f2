"""As it is for the first steps, then as the wrapped method does."""

from __future__ import annotations

import pytest
import torch

import laconic
from laconic.compression import (
    Adaptive,
    Bf16,
    Chain,
    Compressor,
    Diana,
    Ef21,
    ErrorFeedback,
    Int4,
    Int8,
    NoCompression,
    PowerSgd,
    Qsgd,
    TopK,
    Warmup,
)
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.errors import IllegalCombination, InvalidSetting
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


def test_two_wrappers_with_a_first_of_their_own_do_not_mix_them() -> None:
    """Both may have the same method with other settings; after the warm-up the inner one is in its first window."""
    found = results(Warmup(Adaptive(TopK(), first=Int8(block=64)), steps=2, first=Int8(block=32)), range(4))
    assert found[:2] == results(Int8(block=32), range(2))
    assert found[2:] == results(Int8(block=64), range(2, 4))


@pytest.mark.parametrize(
    "compressor",
    [
        Ef21(Warmup(TopK(density=0.1), steps=4, first=Int4())),
        Ef21(Adaptive(Int4(), period=1, change=3.0)),
        Diana(Warmup(Qsgd(), steps=4, first=Int4())),
    ],
    ids=str,
)
@pytest.mark.parametrize("steps", [4, 9])
def test_estimates_of_all_ranks_add_up_to_the_common_one(compressor: Compressor, steps: int) -> None:
    """Also if some of the steps send sums back: what these lose would stay in the common estimate for good."""
    bucket = Bucket((TensorSpec("weight", (3000,)),))

    def one_rank(transport: InProcessTransport) -> dict[str, torch.Tensor]:
        state = compressor.init(bucket)
        for step in range(steps):
            flat = values(transport.rank, step, bucket.numel, bucket.dtype)
            exchange(compressor, flat, state, transport, step=step)
        return {name.split(".")[1]: value.double() for name, value in state.flat.items()}

    replicas = InProcessCluster(4).run(one_rank)
    own = torch.stack([fields["own"] for fields in replicas]).sum(0)
    owed = torch.stack([fields.get("owed", torch.zeros(())) for fields in replicas]).sum(0)
    assert float((own - owed - replicas[0]["all"]).norm()) < 1e-5 * float(own.norm())


def test_first_is_a_method_without_wrappers() -> None:
    """Strategy text has no place for a wrapper there, and what it remembers would not be saved."""
    for wrapper in (Warmup, Adaptive):
        with pytest.raises(InvalidSetting, match=r'first = "topk \+ chain" is a wrapper'):
            wrapper(PowerSgd(), first=Chain(TopK()))


@pytest.mark.parametrize(
    ("text", "reason", "nearest"),
    [
        (
            "topk + warmup(first=terngrad) + error_feedback",
            "would grow without bound",
            "bsp / all_reduce / topk + warmup(first=terngrad) / fusion",
        ),
        (
            "qsgd + warmup(first=int8(route=scatter)) + diana",
            "int8.route has no effect inside diana",
            "bsp / all_reduce / qsgd + warmup(first=int8) + diana / fusion",
        ),
    ],
)
def test_a_first_that_does_not_fit_is_refused(text: str, reason: str, nearest: str) -> None:
    with pytest.raises(IllegalCombination, match=reason) as caught:
        laconic.Strategy.parse(f"bsp / all_reduce / {text}")
    assert str(caught.value).endswith(f'Nearest that works: "{nearest}".')


def test_a_route_of_first_has_no_effect_among_neighbours() -> None:
    with pytest.raises(IllegalCombination, match=r"int8\.route has no effect with choco"):
        laconic.Strategy.parse("bsp / choco / topk + warmup(first=int8(route=scatter))")
