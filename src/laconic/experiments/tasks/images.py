"""The small CNN on labelled images from an .npz file.

The file holds an array of images, (number, height, width) or (number, height, width, channels), and one of whole-number
labels. They are found by name: train_images/train_labels, images/labels, x_train/y_train or x/y.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer

from laconic.errors import UsageError, one_line
from laconic.experiments.small_cnn import SmallCnn, cnn_shape
from laconic.experiments.tasks.contract import TaskConfig, batch_generator, millions

_NAMES = (("train_images", "train_labels"), ("images", "labels"), ("x_train", "y_train"), ("x", "y"))
_MOST_CLASSES = 10_000


def load_images(path: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images as (number, channels, height, width) with mean 0 and variance 1, and their labels."""
    images, labels = _arrays(Path(path))
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or labels.shape != images.shape[:1] or not len(labels):
        raise UsageError(
            f"{path}: images must be (number, height, width[, channels]) with one label each, got {images.shape} and "
            f"{labels.shape}."
        )
    whole = np.issubdtype(labels.dtype, np.integer)
    if not whole or labels.min() < 0 or labels.max() >= _MOST_CLASSES:
        raise UsageError(f"{path}: labels must be whole numbers from 0 to {_MOST_CLASSES - 1}.")
    scaled = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2), dtype=np.float32))
    if not torch.isfinite(scaled).all():
        raise UsageError(f"{path}: the images hold values that are not finite.")
    scaled = (scaled - scaled.mean()) / scaled.std().clamp_min(1e-6)
    return scaled, torch.from_numpy(labels.astype(np.int64))


def _arrays(path: Path) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    try:
        # Without pickles: an image file must not be able to run code.
        with np.load(path, allow_pickle=False) as file:
            for images, labels in _NAMES:
                if images in file and labels in file:
                    return file[images], file[labels]
            found = ", ".join(file) or "nothing"
    except OSError as exc:
        raise UsageError(f"cannot read the image file {path}: {exc.strerror or one_line(exc)}.") from exc
    except (ValueError, AttributeError, TypeError, EOFError, zipfile.BadZipFile) as exc:
        raise UsageError(f"the image file {path} is not an .npz archive of arrays: {one_line(exc, 100)}.") from exc
    wanted = "; ".join(f"{images} and {labels}" for images, labels in _NAMES)
    raise UsageError(f"the image file {path} holds {found}; expected: {wanted}.")


class ImageTask:
    """Classify images, in random batches."""

    learns = True

    def __init__(self, config: TaskConfig) -> None:
        if config.data is None:
            raise UsageError("give the images as a file: --images FILE.npz.")
        self._config = config
        self._shape = cnn_shape(config.size)
        self._images, self._labels = load_images(config.data)
        self._classes = int(self._labels.max()) + 1
        with torch.device("meta"):
            self.num_parameters = sum(parameter.numel() for parameter in self._model().parameters())
        self.title = f"CNN ({config.size}, {millions(self.num_parameters)} parameters) on {Path(config.data).name}"

    def _model(self) -> SmallCnn:
        return SmallCnn(self._shape, channels=self._images.shape[1], classes=self._classes)

    def model(self) -> nn.Module:
        torch.manual_seed(self._config.seed)
        return self._model()

    def optimizer(self, model: nn.Module, *, directions: bool = False) -> Optimizer:
        """SGD for directions, else AdamW: with the same learning rate, steps of both are about equally long."""
        kind = torch.optim.SGD if directions else torch.optim.AdamW
        return kind(model.parameters(), lr=self._config.learning_rate)

    def batch(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = batch_generator(self._config.seed, step, rank)
        chosen = torch.randint(len(self._labels), (self._config.batch,), generator=generator)
        return self._images[chosen], self._labels[chosen]

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats."""
        return functional.cross_entropy(outputs, targets)
