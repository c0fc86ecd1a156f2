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
"""One file in so many is never trained on."""
_LEARNED_FROM_BYTES = 40_000_000
"""Enough text to learn a vocabulary from; all of it would only take longer."""


@dataclass(frozen=True)
class Tokens:
    """The text as token numbers."""

    train: torch.Tensor
    held_out: torch.Tensor


def prepare(path: Path, vocabulary: int, most_bytes: int) -> None:
    """Read the text, learn the vocabulary, and write the tokens to `path`, if they are not there yet."""
    if path.exists():
        return
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
    coded = [np.asarray(coding.ids, dtype=np.uint16) for coding in tokenizer.encode_batch(texts)]
    held_out = np.concatenate(coded[::_HELD_OUT_EVERY])
    train = np.concatenate([ids for number, ids in enumerate(coded) if number % _HELD_OUT_EVERY])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez(file, train=train, held_out=held_out)


def load(path: Path, device: torch.device) -> Tokens:
    """What `prepare` wrote."""
    with np.load(path, allow_pickle=False) as file:
        return Tokens(*(torch.from_numpy(file[name].astype(np.int32)).to(device) for name in ("train", "held_out")))


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
