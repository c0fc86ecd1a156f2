"""Lightning on two ranks, with laconic and with its own DDP."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations.problem import Model, difference
from tests.processes import run_processes

pytest.importorskip("lightning")

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(240)]

Found = list[dict[str, Any]]
"""What each rank has found."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("lightning")
    target = "tests.integrations.lightning_ranks:everything"
    results = run_processes(target, world_size=2, arguments={"folder": str(folder)}, timeout_s=200)
    return [result.value for result in results]


@pytest.mark.parametrize(
    ("ddp", "laconic"),
    [
        ("ddp", "lossless"),
        ("ddp", "auto"),
        ("ddp accumulating", "lossless accumulating"),
        ("ddp without clipping", "deferred"),
    ],
)
def test_lossless_is_ddp(ranks: Found, ddp: str, laconic: str) -> None:
    assert difference(ranks[0][ddp], ranks[0][laconic]) <= 1e-6
    assert difference(ranks[0][laconic], ranks[1][laconic]) == 0


def test_accumulation_sends_once_per_optimizer_step(ranks: Found) -> None:
    gradients = 4 * sum(parameter.numel() for parameter in Model().parameters())
    for rank in ranks:
        assert rank["sent"] == [gradients * ((batch + 1) // 4) for batch in range(12)]
        assert rank["predicted"] == gradients


def test_replicas_differ_between_rounds_and_end_averaged(ranks: Found) -> None:
    for rank in ranks:
        assert [distance == 0 for distance in rank["distances"]] == [False, False, True, False, False, True, False]
        assert rank["session is left"] is False
    assert difference(ranks[0]["diloco"], ranks[1]["diloco"]) == 0


def test_gradients_are_there_before_the_optimizers_step(ranks: Found) -> None:
    # onebit_adam refuses a step whose gradients a closure computes, as Lightning's own steps do.
    assert difference(ranks[0]["onebit_adam"], ranks[1]["onebit_adam"]) == 0
    assert difference(ranks[0]["onebit_adam"], ranks[0]["ddp"]) > 0


@pytest.mark.parametrize("name", ["compressed", "diloco"])
def test_a_resumed_run_is_the_uninterrupted_one(ranks: Found, name: str) -> None:
    for rank in ranks:
        assert difference(rank[f"{name} at once"], rank[f"{name} resumed"]) == 0


def test_training_begins_anew_after_a_learning_rate_was_found(ranks: Found) -> None:
    assert difference(ranks[0]["ddp tuned"], ranks[0]["lossless tuned"]) <= 1e-6
    for name in ("lossless tuned", "tuned and resumed"):
        assert difference(ranks[0][name], ranks[1][name]) == 0


def test_each_rank_keeps_a_file_as_long_as_the_checkpoint(ranks: Found) -> None:
    assert ranks[0]["files"] == ["step=8.ckpt.rank0", "step=8.ckpt.rank1"]
    left = ["laconic/step=6.ckpt.rank0", "laconic/step=6.ckpt.rank1", "step=6.ckpt"]
    assert ranks[0]["files that are left"] == left


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("wrapped", ["AttachError", '"network"', "DistributedDataParallel"]),
        ("manual", ["AttachError", "automatic_optimization=False", "laconic.attach()"]),
        ("no state", ["CheckpointError", "step=3.ckpt.rank", 'missing_state="reset"']),
        ("setting", ["AttachError", "missing_state"]),
    ],
)
def test_refusals_say_what_to_write(ranks: Found, case: str, words: list[str]) -> None:
    for rank in ranks:
        for word in words:
            assert word in rank["refusals"][case]


@pytest.mark.parametrize("kind", ["failure", "failure that is saved"])
def test_an_error_on_one_rank_reaches_the_other(ranks: Found, kind: str) -> None:
    assert ranks[1][kind] == "ValueError: a bad batch"
    assert ranks[0][kind].startswith("PeerLost: ")
    assert "rank 1 raised ValueError: a bad batch" in ranks[0][kind]
