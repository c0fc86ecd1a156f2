"""The small GPT on text: the Python standard library's own source, which every machine has, or any file."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer

from laconic.errors import UsageError
from laconic.experiments.small_gpt import SmallGpt, gpt_shape
from laconic.experiments.tasks.contract import TaskConfig, batch_generator, millions

_LIBRARY_BYTES = 4_000_000
"""Enough for any run here; reading the whole library would only slow the start."""
_LEAST_BYTES = 10_000


def load_text(path: str | None = None) -> torch.Tensor:
    """The bytes of a text file, or of the standard library's modules in alphabetical order, one token each."""
    data = b"".join(_modules()) if path is None else _file(Path(path))
    if len(data) < _LEAST_BYTES:
        raise UsageError(f"{path} holds {len(data)} bytes; at least {_LEAST_BYTES} are needed to train on.")
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def library_files() -> list[torch.Tensor]:
    """The bytes of each of the standard library's modules, in alphabetical order."""
    return [torch.from_numpy(np.frombuffer(source, dtype=np.uint8).copy()) for source in _modules() if source]


def _modules() -> list[bytes]:
    parts: list[bytes] = []
    size = 0
    for module in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        parts.append(module.read_bytes())
        size += len(parts[-1])
        if size >= _LIBRARY_BYTES:
            break
    if size < _LEAST_BYTES:
        raise UsageError("the Python standard library's source is not installed here; give a text file with --data.")
    return parts


def _file(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise UsageError(f"cannot read the data file {path}: {exc.strerror}.") from exc
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise UsageError(f"the data file {path} is not UTF-8 text (byte {exc.start}).") from exc
    return data


class TextTask:
    """Predict each byte of a text from those before it, in random windows."""

    learns = True

    def __init__(self, config: TaskConfig) -> None:
        self._config = config
        self._shape = gpt_shape(config.size)
        self._tokens = load_text(config.data)
        # On the meta device: only the shapes count.
        with torch.device("meta"):
            self.num_parameters = sum(parameter.numel() for parameter in SmallGpt(self._shape).parameters())
        self.title = f"GPT ({config.size}, {millions(self.num_parameters)} parameters) on text"

    def model(self) -> nn.Module:
        torch.manual_seed(self._config.seed)
        return SmallGpt(self._shape)

    def optimizer(self, model: nn.Module, *, directions: bool = False) -> Optimizer:
        """SGD for directions, else AdamW: with the same learning rate, steps of both are about equally long."""
        kind = torch.optim.SGD if directions else torch.optim.AdamW
        return kind(model.parameters(), lr=self._config.learning_rate)

    def batch(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self._shape.context + 1
        generator = batch_generator(self._config.seed, step, rank)
        starts = torch.randint(len(self._tokens) - window, (self._config.batch,), generator=generator)
        rows = torch.stack([self._tokens[start : start + window] for start in starts.tolist()]).to(torch.int64)
        return rows[:, :-1], rows[:, 1:]

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats."""
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
