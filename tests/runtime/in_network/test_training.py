"""Training with in_network, ranks and the aggregator being threads of this process."""

from __future__ import annotations

import copy
import logging
from functools import partial

import pytest
import torch

import laconic
from laconic.compression import COMPRESSORS
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.errors import AttachError, IllegalCombination
from laconic.runtime.servers import child_process
from laconic.strategy import Strategy
from tests.core.sockets import nothing_left
from tests.runtime.replicas import assert_equal, mlp, mlp_loss, sgd, snapshot

pytestmark = pytest.mark.timeout(90)
SAMPLE = Bucket((TensorSpec("weight", (64, 64)), TensorSpec("bias", (64,))))


def trained(strategy: str, *, world_size: int = 3, steps: int = 4) -> list[tuple[dict[str, torch.Tensor], int, int]]:
    """For each rank: the model, the payload bytes that it has sent, and those that were predicted."""
    first = mlp()  # not in threads, which share torch's generator

    def rank(transport: InProcessTransport) -> tuple[dict[str, torch.Tensor], int, int]:
        model = copy.deepcopy(first)
        optimizer, predicted = sgd(model), 0
        with laconic.attach(model, optimizer, strategy, transport=transport):
            for step in range(steps):
                mlp_loss(model, step, transport.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            tensors = [TensorSpec(name, tuple(p.shape)) for name, p in model.named_parameters()]
            parsed = Strategy.parse(strategy)
            for step in range(steps):
                moment = Moment(step, transport.rank, world_size, step)
                buckets = parsed.plan(tensors, world_size).buckets
                predicted += sum(parsed.architecture.sent_bytes(one, parsed.codec, moment) for one in buckets)
        return snapshot(model), transport.traffic.sent_bytes("payload"), predicted

    with nothing_left():
        return InProcessCluster(world_size).run(rank)


@pytest.mark.parametrize("compression", ["none", "bf16", "intsgd", "thc", "powersgd(rank=1) + error_feedback"])
def test_replicas_are_equal_and_bytes_are_as_predicted(compression: str) -> None:
    found = trained(f"bsp / in_network / {compression}")
    plain = trained(f"bsp / all_reduce / {compression}")
    for model, sent, predicted in found:
        assert_equal(model, found[0][0])
        assert sent == predicted
    for name, value in found[0][0].items():
        # Integers: the same sums. Floating point: but for the rounding of sums.
        torch.testing.assert_close(value, plain[0][0][name], rtol=1e-2, atol=1e-2 if compression == "bf16" else 1e-5)


def test_local_updates_go_the_same_way() -> None:
    found = trained("local_sgd(period=2) / in_network(slots=3) / none")
    assert_equal(found[1][0], found[0][0])


def test_a_server_without_slots_forms_the_same_sums(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_slots = trained("bsp / in_network / intsgd")
    monkeypatch.setattr(child_process, "Server", partial(child_process.Server, most_slots=0))
    with caplog.at_level(logging.WARNING, "laconic"):
        whole = trained("bsp / in_network / intsgd")
    assert "has 0 of the 512 slots that were asked for: it forms sums of whole tensors instead" in caplog.text
    for (model, sent, _), (other, also_sent, _) in zip(in_slots, whole, strict=True):
        # The first round sums floating-point values, which are rounded differently.
        torch.testing.assert_close(model, other, rtol=1e-6, atol=1e-6)
        assert sent == also_sent


def test_what_cannot_be_added_up_is_refused_by_name() -> None:
    accepted, refused = set[str](), set[str]()
    for kind in COMPRESSORS:
        if kind.family == "wrapper":
            continue
        compression = kind()
        if compression.traits.sums_only or compression.traits.payloads_add_up:
            Strategy.parse(f"bsp / in_network / {compression}")
            accepted.add(kind.name)
            for moment in (Moment(world_size=4), Moment.steady(4)):
                assert {round.kind for round in compression.rounds(SAMPLE, moment)} <= {"sum"}
        else:
            with pytest.raises(IllegalCombination, match=f'in_network adds up integers on the way.*"{kind.name}'):
                Strategy.parse(f"bsp / in_network / {compression}")
            refused.add(kind.name)
    assert {"none", "fp16", "bf16", "intsgd", "thc", "powersgd"} <= accepted
    assert {"topk", "int8", "signsgd", "qsgd"} <= refused


def test_what_else_does_not_fit_is_refused_by_name() -> None:
    for text, named in (
        ("asp / in_network", "asp does not wait"),
        ("bsp / in_network / none / dear", "dear splits an all-reduce"),
    ):
        with pytest.raises(IllegalCombination, match=named):
            Strategy.parse(text)
    model = mlp()
    with pytest.raises(AttachError, match="in_network"):
        laconic.attach(model, sgd(model), "bsp / in_network", elastic=True)
