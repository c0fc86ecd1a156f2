"""Tasks: the same weights and batches for the same seed, and clear words about data that cannot be used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from laconic.errors import UsageError
from laconic.experiments.tasks import TaskConfig, make_task


@pytest.fixture
def image_file(tmp_path: Path) -> Path:
    path = tmp_path / "images.npz"
    random = np.random.default_rng(0)
    np.savez(path, images=random.integers(0, 255, (50, 8, 8), dtype=np.uint8), labels=random.integers(0, 10, 50))
    return path


def configs(image_file: Path) -> list[TaskConfig]:
    return [
        TaskConfig(size="tiny", batch=3),
        TaskConfig(kind="images", size="tiny", batch=3, data=str(image_file)),
        TaskConfig(kind="replay", data="resnet50", compute_s=0.02),
    ]


def test_every_task_trains(image_file: Path) -> None:
    for config in configs(image_file):
        task = make_task(config)
        model = task.model()
        optimizer = task.optimizer(model)
        inputs, targets = task.batch(0, 0)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        task.loss(model(inputs), targets).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert moved == task.learns, config.kind


def test_weights_and_batches_depend_on_seed_step_and_rank_alone(image_file: Path) -> None:
    for config in configs(image_file)[:2]:
        one, other = make_task(config), make_task(config)
        for a, b in zip(one.model().parameters(), other.model().parameters(), strict=True):
            assert torch.equal(a, b)
        batches = {(step, rank): one.batch(step, rank)[0] for step in range(3) for rank in range(2)}
        for (step, rank), batch in batches.items():
            assert torch.equal(batch, other.batch(step, rank)[0])
            assert all(not torch.equal(batch, batches[key]) for key in batches if key != (step, rank))


def test_images_are_standardised(image_file: Path) -> None:
    task = make_task(TaskConfig(kind="images", size="tiny", batch=50, data=str(image_file)))
    images, labels = task.batch(0, 0)
    assert images.shape == (50, 1, 8, 8)
    assert abs(images.mean().item()) < 0.2
    assert labels.dtype == torch.int64


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({"pictures": np.zeros((2, 2, 2))}, "holds pictures; expected:"),
        ({"x": np.zeros((2, 2)), "y": np.zeros(2, int)}, "images must be"),
        ({"x": np.zeros((2, 2, 2)), "y": np.zeros(3, int)}, "images must be"),
        ({"x": np.zeros((0, 2, 2)), "y": np.zeros(0, int)}, "images must be"),
        ({"x": np.zeros((2, 2, 2)), "y": np.zeros(2)}, "labels must be whole numbers"),
        ({"x": np.zeros((2, 2, 2)), "y": np.array([-1, 0])}, "labels must be whole numbers"),
        ({"x": np.full((2, 2, 2), np.nan), "y": np.zeros(2, int)}, "not finite"),
    ],
)
def test_image_files_that_cannot_be_used(arrays: dict[str, np.ndarray], told: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, **arrays)
    with pytest.raises(UsageError, match=told):
        make_task(TaskConfig(kind="images", data=str(path)))


def test_what_is_no_archive_or_needs_a_pickle_is_refused(tmp_path: Path) -> None:
    text, pickled = tmp_path / "text.npz", tmp_path / "pickled.npz"
    text.write_text("hello")
    np.savez(pickled, x=np.array([{}], dtype=object), y=np.zeros(1, int))
    for path in (text, pickled):
        with pytest.raises(UsageError, match=r"not an \.npz archive"):
            make_task(TaskConfig(kind="images", data=str(path)))
    with pytest.raises(UsageError, match="No such file"):
        make_task(TaskConfig(kind="images", data=str(tmp_path / "none.npz")))


@pytest.mark.parametrize("settings", [{"batch": 7}, {"size": "tiny"}, {"seed": 3}, {"learning_rate": 0.1}])
def test_a_replay_refuses_what_it_would_ignore(settings: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(settings))} has no effect on a replayed workload"):
        TaskConfig(kind="replay", data="resnet50", **settings)


@pytest.mark.parametrize(
    "settings", [{"batch": 0}, {"learning_rate": 0.0}, {"learning_rate": float("nan")}, {"compute_s": -1.0}]
)
def test_settings_out_of_range(settings: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        TaskConfig(**settings)
