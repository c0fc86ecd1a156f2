"""What is learned: the tiny GPT on text and the tiny CNN on images, each with data that is never trained on."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.convergence.drawn_digits import drawn_digits
from benchmarks.convergence.recipe import Recipe
from benchmarks.convergence.skew import OwnImages, OwnText, Skew
from laconic.errors import UsageError
from laconic.experiments.tasks import Task, TaskConfig, make_task
from laconic.experiments.tasks.images import load_images
from laconic.experiments.tasks.text import library_files

WORKERS = 4
"""Unless told otherwise."""
DRAWN = "drawn"
"""What --images names the digits by that are drawn here."""
_BATCH = {"text": 4, "images": 8}
"""Samples per worker and step: small, so that many steps fit into the time."""
_HELD_OUT_RANK = 1000
"""A rank no worker has: its windows of the text are others than those trained on."""
_HELD_OUT_BATCHES = 100

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Subject:
    """A task, made anew for every seed, and how it is usually trained."""

    name: str
    usual: Recipe
    tasks: Sequence[Task]
    """One per seed: other weights to begin with, other batches."""
    held_out: Sequence[Batch]
    """The same for every seed."""
    counts_right: bool
    """Whether there is one answer per sample, so that right ones can be counted."""

    def judge(self, model: nn.Module) -> tuple[float, float | None]:
        """Loss and, where there is one, accuracy on the data held out."""
        model.eval()
        losses, right, count = 0.0, 0, 0
        with torch.no_grad():
            for inputs, targets in self.held_out:
                outputs = model(inputs)
                losses += self.tasks[0].loss(outputs, targets).item() * len(inputs)
                right += int((outputs.argmax(dim=-1) == targets).sum())
                count += len(inputs)
        return losses / count, right / count if self.counts_right else None


def text(seeds: int, skew: Skew | None = None, workers: int = WORKERS) -> Subject:
    """The next byte of the standard library's source; a transformer, so AdamW is usual."""
    tasks = [make_task(TaskConfig(size="tiny", batch=_BATCH["text"], seed=seed)) for seed in range(seeds)]
    held_out = [tasks[0].batch(step, _HELD_OUT_RANK) for step in range(_HELD_OUT_BATCHES)]
    if skew is not None:
        tasks = [
            OwnText(task, library_files(), skew=skew, workers=workers, seed=seed) for seed, task in enumerate(tasks)
        ]
    return Subject("text", Recipe(optimizer="adamw", learning_rate=3e-3), tasks, held_out, counts_right=False)


def images(seeds: int, path: str | None, skew: Skew | None = None, workers: int = WORKERS) -> Subject:
    """The class of an image, one in five held out; a CNN, so SGD with momentum is usual."""
    images, labels = _loaded(path)
    held = torch.arange(len(labels)) % 5 == 0
    with tempfile.TemporaryDirectory(prefix="laconic-") as folder:
        file = str(Path(folder) / "train.npz")
        np.savez(file, images=images[~held].permute(0, 2, 3, 1).numpy(), labels=labels[~held].numpy())
        tasks = [
            make_task(TaskConfig(kind="images", size="tiny", batch=_BATCH["images"], data=file, seed=seed))
            for seed in range(seeds)
        ]
    if skew is not None:
        own = images[~held], labels[~held]
        tasks = [OwnImages(task, *own, skew=skew, workers=workers, seed=seed) for seed, task in enumerate(tasks)]
    recipe = Recipe(optimizer="sgd", learning_rate=0.1, momentum=0.9)
    return Subject("images", recipe, tasks, [(images[held], labels[held])], counts_right=True)


def _loaded(path: str | None) -> Batch:
    if path is None:
        return _digits()
    return drawn_digits() if path == DRAWN else load_images(path)


@cache
def _digits() -> Batch:
    try:
        # By name: checked for types with it and without.
        datasets = importlib.import_module("sklearn.datasets")
    except ModuleNotFoundError as exc:
        raise UsageError(
            'the digits come from scikit-learn, which is not installed: pip install "laconic[benchmarks]". '
            "Or give images of your own with --images FILE.npz, take those drawn here with --images drawn, or leave "
            "images out with --tasks text."
        ) from exc
    found = datasets.load_digits()
    with tempfile.TemporaryDirectory(prefix="laconic-") as folder:
        file = str(Path(folder) / "digits.npz")
        np.savez(file, images=found.images, labels=found.target)
        return load_images(file)
