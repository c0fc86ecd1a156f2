"""Does it still learn? Every compressor with its recommended wrapper beside no compression, at equal steps.

    python -m benchmarks.convergence [--steps 300] [--only topk] [--images FILE.npz] [--json]

Four workers in one process train the tiny GPT on text and the tiny CNN on images (scikit-learn's digits unless --images
names a file), from the same weights on the same batches. Printed is the mean training loss over the last tenth of the
steps, beside that without compression; for images also the accuracy on held-out ones.

Methods that keep a momentum of their own are trained with SGD, beside SGD with momentum; all others with AdamW.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

import laconic
from laconic.compression import COMPRESSORS, Compressor, ErrorFeedback, NoCompression, Wrapper
from laconic.core.in_process import InProcessTransport
from laconic.experiments.tasks import Task, TaskConfig, make_task
from laconic.experiments.tasks.images import load_images

WORKERS = 4
OWN_MOMENTUM = ("dgc",)
"""Methods trained with plain SGD: they add the momentum themselves."""


@dataclass(frozen=True)
class Row:
    """One method on one task."""

    task: str
    method: str
    compression: str
    loss: float
    change: float
    """Relative to no compression."""
    accuracy: float | None
    megabytes: float
    """Sent by each worker."""


def recommended() -> dict[str, Compressor]:
    """Every method by itself, with error feedback where it wants that."""
    found: dict[str, Compressor] = {}
    for kind in COMPRESSORS:
        if not issubclass(kind, Wrapper) and kind is not NoCompression:
            plain = kind()
            found[kind.name] = ErrorFeedback(plain) if plain.wants_error_feedback else plain
    return found


class Trainer:
    """One task, trained under one compressor after another."""

    def __init__(self, name: str, task: Task, held_out: tuple[torch.Tensor, torch.Tensor] | None, steps: int) -> None:
        self.name = name
        self._task = task
        self._held_out = held_out
        self._steps = steps
        self._model = task.model()
        self._references: dict[bool, float] = {}

    def run(self, method: str, compression: Compressor) -> Row:
        """Train and compare."""
        own_momentum = method in OWN_MOMENTUM
        if own_momentum not in self._references:
            self._references[own_momentum] = self._train(NoCompression(), momentum=0.9 if own_momentum else None)[0]
        loss, accuracy, sent = self._train(compression, momentum=0.0 if own_momentum else None)
        change = loss / self._references[own_momentum] - 1
        return Row(self.name, method, str(compression), loss, change, accuracy, sent / 1e6)

    def _train(self, compression: Compressor, momentum: float | None) -> tuple[float, float | None, int]:
        def one_rank(transport: InProcessTransport) -> tuple[list[float], nn.Module, int]:
            model = copy.deepcopy(self._model)
            if momentum is None:
                optimizer = self._task.optimizer(model)
            else:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
            losses = []
            strategy = laconic.Strategy(compression=compression)
            with laconic.attach(model, optimizer, strategy, transport=transport) as session:
                for step in range(self._steps):
                    inputs, targets = self._task.batch(step, transport.rank)
                    loss = self._task.loss(model(inputs), targets)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.item())
                sent = session.traffic.sent_bytes("payload")
            return losses, model, sent

        replicas = laconic.InProcessCluster(WORKERS, timeout_s=120).run(one_rank)
        means = [statistics.fmean(losses) for losses in zip(*(losses for losses, _, _ in replicas), strict=True)]
        tail = means[-max(1, len(means) // 10) :]
        return statistics.fmean(tail), self._accuracy(replicas[0][1]), replicas[0][2]

    def _accuracy(self, model: nn.Module) -> float | None:
        if self._held_out is None:
            return None
        images, labels = self._held_out
        model.eval()
        with torch.no_grad():
            return (model(images).argmax(dim=1) == labels).float().mean().item()


def text_trainer(steps: int) -> Trainer:
    task = make_task(TaskConfig(size="tiny", batch=8, learning_rate=3e-3))
    return Trainer("text", task, None, steps)


def image_trainer(path: str | None, steps: int) -> Trainer:
    """One image in five is held out."""
    with tempfile.TemporaryDirectory(prefix="laconic-") as folder:
        if path is None:
            path = str(Path(folder) / "digits.npz")
            np.savez(path, images=(digits := _digits())[0], labels=digits[1])
        images, labels = load_images(path)
        held = torch.arange(len(labels)) % 5 == 0
        part = str(Path(folder) / "train.npz")
        channels_last = images.permute(0, 2, 3, 1)
        np.savez(part, images=channels_last[~held].numpy(), labels=labels[~held].numpy())
        task = make_task(TaskConfig(kind="images", size="tiny", batch=16, learning_rate=3e-3, data=part))
    return Trainer("images", task, (images[held], labels[held]), steps)


def _digits() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits  # pyrefly: ignore - installed by whoever wants it
    except ModuleNotFoundError:
        sys.exit('The images come from scikit-learn: "pip install scikit-learn", or give --images FILE.npz.')
    found = load_digits()
    return found.images, found.target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", action="append", default=[], metavar="METHOD")
    parser.add_argument("--tasks", nargs="+", choices=["text", "images"], default=["text", "images"])
    parser.add_argument("--images", metavar="FILE.npz")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    methods = {name: method for name, method in recommended().items() if not options.only or name in options.only}
    if not methods:
        sys.exit(f"there is no method {', '.join(options.only)}; known are {', '.join(recommended())}.")
    trainers = []
    if "text" in options.tasks:
        trainers.append(text_trainer(options.steps))
    if "images" in options.tasks:
        trainers.append(image_trainer(options.images, options.steps))
    rows: list[Row] = []
    for trainer in trainers:
        baseline = trainer.run("none", NoCompression())
        for name, method in {"none": NoCompression(), **methods}.items():
            began_s = time.perf_counter()
            row = baseline if name == "none" else trainer.run(name, method)
            rows.append(row)
            if not options.json:
                accuracy = "" if row.accuracy is None else f"  accuracy {row.accuracy:.1%}"
                ratio = baseline.megabytes / row.megabytes if row.megabytes else float("inf")
                print(
                    f"{row.task:6} {row.compression:44} loss {row.loss:.4f} ({row.change:+.1%}){accuracy}"
                    f"  {ratio:6.1f}x fewer bytes  {time.perf_counter() - began_s:5.1f} s",
                    flush=True,
                )
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
