"""Sets of flows that begin together, each stored once however often it is used."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]
_Indices = npt.NDArray[np.int64]


class FlowSets:
    """Collects flow sets; equal sets share a number."""

    def __init__(self) -> None:
        self.patterns: list[tuple[_Indices, _Indices]] = []
        """Sources and destinations."""
        self.sets: list[tuple[int, _Floats]] = []
        """The pattern of each set, and the bytes of each of its flows."""
        self.uses: list[int] = []
        """How often each set was added."""
        self._known: dict[bytes, int] = {}

    def add(self, sources: _Indices, destinations: _Indices, num_bytes: _Floats) -> int:
        """The number of the set with these flows."""
        # Keyed by digest: as keys, the arrays would be in memory twice.
        pair = _digest(sources, destinations)
        pattern = self._known.setdefault(pair, len(self.patterns))
        if pattern == len(self.patterns):
            self.patterns.append((sources.copy(), destinations.copy()))
        number = self._known.setdefault(pair + _digest(num_bytes), len(self.sets))
        if number == len(self.sets):
            self.sets.append((pattern, num_bytes.copy()))
            self.uses.append(0)
        self.uses[number] += 1
        return number

    def last_devices(self) -> _Indices:
        """The highest device number in each set; -1 if it has no flows."""
        of_pattern = [max(s.max(initial=-1), d.max(initial=-1)) for s, d in self.patterns]
        return np.array([of_pattern[pattern] for pattern, _ in self.sets], dtype=np.int64)


def _digest(*arrays: npt.NDArray[np.generic]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()
