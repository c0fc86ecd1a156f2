"""Text every machine has, the source of its Python packages, in the tokens of a byte-pair encoding trained on it."""

from __future__ import annotations

import hashlib
import importlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from laconic.errors import UsageError

_HELD_OUT_EVERY = 50
"""About one file in so many is never trained on."""
_LEARNED_FROM_BYTES = 40_000_000
"""Enough text to learn a vocabulary from; all of it would only take longer."""


@dataclass(frozen=True)
class Tokens:
    """The text as token numbers."""

    train: torch.Tensor
    held_out: torch.Tensor


def prepare(path: Path, vocabulary: int, most_bytes: int) -> str:
    """Read the text, learn the vocabulary, and write the tokens to `path`, if they are not there yet; their digest."""
    if not path.exists():
        _write(path, vocabulary, most_bytes)
    digest = hashlib.blake2b(digest_size=4)
    with np.load(path, allow_pickle=False) as file:
        for name in ("train", "held_out"):
            digest.update(file[name].tobytes())
    return digest.hexdigest()


def _write(path: Path, vocabulary: int, most_bytes: int) -> None:
    try:
        # By name: checked for types with it and without.
        tokenizers: Any = importlib.import_module("tokenizers")
    except ModuleNotFoundError as exc:
        raise UsageError('byte pairs are learned by tokenizers: pip install "laconic[benchmarks]".') from exc
    texts = list(_texts(most_bytes))
    learned_from: list[str] = []
    size = 0
    for text in texts:
        if size < _LEARNED_FROM_BYTES:
            learned_from.append(text)
            size += len(text)
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(learned_from, vocab_size=vocabulary, min_frequency=2, show_progress=False)
    train: list[np.ndarray] = []
    held_out: list[np.ndarray] = []
    for text, coding in zip(texts, tokenizer.encode_batch(texts), strict=True):
        (held_out if _is_held_out(text) else train).append(np.asarray(coding.ids, dtype=np.uint16))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez(file, train=np.concatenate(train), held_out=np.concatenate(held_out))


def load(path: Path, device: torch.device) -> Tokens:
    """What `prepare` wrote."""
    with np.load(path, allow_pickle=False) as file:
        return Tokens(*(torch.from_numpy(file[name].astype(np.int32)).to(device) for name in ("train", "held_out")))


def _is_held_out(text: str) -> bool:
    """By its content: a further package does not move other files from one side to the other."""
    digest = hashlib.blake2b(text.encode("utf-8", errors="replace"), digest_size=4).digest()
    return int.from_bytes(digest, "big") % _HELD_OUT_EVERY == 0


def _texts(most_bytes: int) -> Iterator[str]:
    """Python files, each content once, in an order that does not depend on where they lie."""
    size = 0
    seen: set[bytes] = set()
    for folder in dict.fromkeys(Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib")):
        for file in sorted(folder.rglob("*.py")):
            data = file.read_bytes()
            digest = hashlib.blake2b(data).digest()
            text = data.decode("utf-8", errors="replace")
            if digest in seen or len(text) < 200:
                continue
            seen.add(digest)
            yield text
            size += len(data)
            if size >= most_bytes:
                return
