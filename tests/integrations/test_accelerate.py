"""accelerate on two ranks, with laconic and with its own DDP."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations.problem import Model, difference
from tests.processes import run_processes

pytest.importorskip("accelerate")

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(180)]

Found = list[dict[str, Any]]
"""What each rank has found."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("accelerate")
    target = "tests.integrations.accelerate_ranks:everything"
    results = run_processes(target, world_size=2, arguments={"folder": str(folder)}, timeout_s=150)
    return [result.value for result in results]


@pytest.mark.parametrize("kind", ["", " accumulating"])
def test_lossless_is_ddp(ranks: Found, kind: str) -> None:
    assert difference(ranks[0][f"ddp{kind}"], ranks[0][f"lossless{kind}"]) <= 1e-6
    assert difference(ranks[0][f"lossless{kind}"], ranks[1][f"lossless{kind}"]) == 0


def test_auto_begins_as_ddp(ranks: Found) -> None:
    assert difference(ranks[0]["ddp"], ranks[0]["auto"]) <= 1e-6


def test_accumulate_holds_exchanges_back(ranks: Found) -> None:
    gradients = 4 * sum(parameter.numel() for parameter in Model().parameters())
    for rank in ranks:
        assert rank["sent"] == [gradients * ((batch + 1) // 3) for batch in range(9)]


def test_nothing_is_left_on_the_model(ranks: Found) -> None:
    for rank in ranks:
        assert rank["no_sync is left"] is False
        assert rank["prepared again"] is True, "accelerator.prepare() wraps no attached model"
        assert rank["prepared after detach()"] == "DistributedDataParallel"


def test_replicas_differ_between_rounds(ranks: Found) -> None:
    for rank in ranks:
        assert [distance == 0 for distance in rank["distances"]] == [False, False, True, False, False, True, False]
    assert difference(ranks[0]["diloco"], ranks[1]["diloco"]) == 0, "session.average() was called"


@pytest.mark.parametrize("name", ["compressed", "diloco"])
def test_load_state_continues_each_rank_where_it_was(ranks: Found, name: str) -> None:
    for rank in ranks:
        assert difference(rank[f"{name} at once"], rank[f"{name} resumed"]) == 0
    apart = difference(ranks[0][f"{name} resumed"], ranks[1][f"{name} resumed"])
    assert (apart > 0) == (name == "diloco"), "a round was not due after the last step"


def test_load_state_continues_several_models(ranks: Found) -> None:
    for rank in ranks:
        for at_once, resumed in zip(rank["two at once"], rank["two resumed"], strict=True):
            assert difference(at_once, resumed) == 0


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("wrapped", ["AttachError", "DistributedDataParallel", "session = prepare(accelerator, model, ...)"]),
        ("handler", ["AttachError", "DistributedDataParallelKwargs", "fusion(25MiB)"]),
        ("no state", ["CheckpointError", "laconic_rank", "before prepare()"]),
        ("twice", ["AttachError", "already attached", "session.detach()"]),
    ],
)
def test_refusals_say_what_to_write(ranks: Found, case: str, words: list[str]) -> None:
    for rank in ranks:
        for word in words:
            assert word in rank["refusals"][case]
