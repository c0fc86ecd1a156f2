"""Text as training data: the Python standard library's own source, which every machine has, or any file."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch

from laconic.errors import UsageError

_LIBRARY_BYTES = 4_000_000
"""Enough for any run here; reading the whole library would only slow the start."""
_LEAST_BYTES = 10_000


def load_text(path: str | None = None) -> torch.Tensor:
    """The bytes of a text file, or of the standard library's modules in alphabetical order, as token numbers."""
    data = _standard_library() if path is None else _file(Path(path))
    if len(data) < _LEAST_BYTES:
        raise UsageError(f"{path} holds {len(data)} bytes; at least {_LEAST_BYTES} are needed to train on.")
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).astype(np.int64))


def _standard_library() -> bytes:
    parts: list[bytes] = []
    size = 0
    for module in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        parts.append(module.read_bytes())
        size += len(parts[-1])
        if size >= _LIBRARY_BYTES:
            break
    if size < _LEAST_BYTES:
        raise UsageError("the Python standard library's source is not installed here; give a text file with --data.")
    return b"".join(parts)


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


class TextBatches:
    """Random windows of a text: the same for the same seed, step and rank, whatever strategy asks."""

    def __init__(self, tokens: torch.Tensor, *, batch: int, window: int, seed: int) -> None:
        self._tokens = tokens
        self._batch = batch
        self._window = window
        self._seed = seed

    def batch(self, step: int, rank: int) -> torch.Tensor:
        """(batch, window) token numbers."""
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + step) * 1_009 + rank)
        starts = torch.randint(len(self._tokens) - self._window, (self._batch,), generator=generator)
        return torch.stack([self._tokens[start : start + self._window] for start in starts.tolist()])
