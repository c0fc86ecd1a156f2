"""Hugging Face Trainer on two ranks, with laconic and with its own DDP."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations.problem import Model, difference
from tests.processes import run_processes

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(240)]

Found = list[dict[str, Any]]
"""What each rank has found."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("trainer")
    target = "tests.integrations.trainer_ranks:everything"
    results = run_processes(target, world_size=2, arguments={"folder": str(folder)}, timeout_s=200)
    return [result.value for result in results]


@pytest.mark.parametrize("kind", ["", " bf16", " compiled", " deferred", " gpt2", " accumulating"])
def test_lossless_is_ddp(ranks: Found, kind: str) -> None:
    # Rank 0: DDP leaves each rank its own running statistics after the last step, and laconic makes them equal.
    assert difference(ranks[0][f"ddp{kind}"], ranks[0][f"lossless{kind}"]) <= 1e-6
    assert difference(ranks[0][f"lossless{kind}"], ranks[1][f"lossless{kind}"]) == 0


def test_accumulation_sends_once_per_optimizer_step(ranks: Found) -> None:
    # Each of two ranks sends the gradients once in an all-reduce.
    gradients = 4 * sum(parameter.numel() for parameter in Model().parameters())
    for rank in ranks:
        assert rank["sent"] == [gradients * step for step in range(1, 7)]
        assert rank["predicted"] == gradients
        assert rank["no_sync is left"] is False


def test_replicas_differ_between_rounds_and_end_averaged(ranks: Found) -> None:
    for rank in ranks:
        assert [distance == 0 for distance in rank["distances"]] == [False, False, True, False, False, True, False]
    assert difference(ranks[0]["diloco"], ranks[1]["diloco"]) == 0


def test_outside_the_block_the_trainer_wraps_its_model_again(ranks: Found) -> None:
    for rank in ranks:
        assert rank["wrapped inside"] is False
        assert rank["wrapped outside"] == "DistributedDataParallel"


@pytest.mark.parametrize("name", ["compressed", "diloco"])
def test_a_resumed_run_is_the_uninterrupted_one(ranks: Found, name: str) -> None:
    for rank in ranks:
        assert difference(rank[f"{name} at once"], rank[f"{name} resumed"]) == 0


def test_auto_continues_from_what_it_had_chosen(ranks: Found) -> None:
    assert difference(ranks[0]["auto"], ranks[1]["auto"]) == 0
    assert difference(ranks[0]["auto"], ranks[0]["ddp"]) > 0, "replicas trained alone for one step"


def test_the_best_model_is_loaded_on_all_ranks(ranks: Found) -> None:
    assert ranks[0]["best folder"] == "checkpoint-1"
    assert difference(ranks[0]["best"], ranks[1]["best"]) == 0
    for rank in ranks:
        assert difference(rank["best"], rank["saved as best"]) == 0


def test_training_continues_from_a_checkpoint_of_ddp(ranks: Found) -> None:
    assert difference(ranks[0]["ddp"], ranks[0]["continued from ddp"]) <= 1e-6


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("wrapped by train()", ["AttachError", "DistributedDataParallel", "LaconicCallback(trainer, ...)"]),
        ("made by train()", ["AttachError", "DistributedDataParallel", "LaconicCallback(trainer, ...)"]),
        ("added by hand", ["AttachError", "outside of its with block", "with LaconicCallback(trainer, ...)"]),
        ("never entered", ["AttachError", "outside of its with block", "with LaconicCallback(trainer, ...)"]),
        ("model_init", ["AttachError", "model_init", "Trainer(model=model_init(), ...)"]),
        ("bucket size", ["AttachError", "ddp_bucket_cap_mb", "fusion(25MiB)"]),
        ("no state", ["CheckpointError", "laconic_rank", 'missing_state="reset"']),
        ("other folder", ["other run/checkpoint-3/laconic_rank0.pt", "resume_from_checkpoint=folder"]),
        ("too short", ["AttachError", "every 64 steps", "takes 6"]),
    ],
)
def test_refusals_say_what_to_write(ranks: Found, case: str, words: list[str]) -> None:
    for rank in ranks:
        for word in words:
            assert word in rank["refusals"][case]


def test_an_error_on_one_rank_reaches_the_other(ranks: Found) -> None:
    assert ranks[1]["failure"] == "ValueError: a bad batch"
    assert ranks[0]["failure"].startswith("PeerLost: ")
    assert "rank 1 raised ValueError: a bad batch" in ranks[0]["failure"]
