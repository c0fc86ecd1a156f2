"""Measured speeds of models: a CSV file with the columns model, gpus, steps_per_s and, if need be, worker_type.

A worker type that ends in "_unconsolidated" holds speeds of jobs whose GPUs are on several hosts. A speed of 0 or less
was not measured. Lines that begin with # are comments; the column "set" distinguishes tables in one file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from laconic.errors import UsageError, did_you_mean, one_line
from laconic.jobs.csv_rows import Line, read_lines

_SPREAD = "_unconsolidated"
_BATCH = re.compile(r"(.*) \(batch size (\d+)\)")


@dataclass(frozen=True)
class Throughputs:
    """Steps per second by model and number of GPUs, for one type of worker."""

    steps_per_s: Mapping[tuple[str, int], float]
    spread_steps_per_s: Mapping[tuple[str, int], float]
    """Speeds of jobs on several hosts, as far as they were measured."""

    @classmethod
    def load(cls, path: str | Path, worker_type: str = "") -> Throughputs:
        """Read a file; `worker_type` may be left out where it holds only one."""
        lines = read_lines(path, ("model", "gpus", "steps_per_s"), ("worker_type", "set"))
        types = list(dict.fromkeys(line.text("worker_type").removesuffix(_SPREAD) for line in lines))
        if not worker_type and len(types) > 1:
            raise UsageError(
                f"{Path(path).name} has several worker types. Choose one with --worker: {', '.join(types)}."
            )
        wanted = worker_type or (types[0] if types else "")
        if wanted not in types:
            raise UsageError(
                f'{Path(path).name}: there is no worker type "{one_line(wanted, 40)}". {did_you_mean(wanted, types)}'
            )
        found: dict[str, dict[tuple[str, int], float]] = {wanted: {}, wanted + _SPREAD: {}}
        for line in lines:
            _add(line, found)
        return cls(found[wanted], found[wanted + _SPREAD])

    def speed(self, model: str, gpus: int) -> float | None:
        """Steps per second, None where that was not measured."""
        return self.steps_per_s.get((model, gpus))

    def scaling(self, model: str) -> tuple[tuple[int, float], ...]:
        """All measured numbers of GPUs of a model, with its steps per second."""
        return tuple(sorted((gpus, speed) for (name, gpus), speed in self.steps_per_s.items() if name == model))

    def spread_slowdown(self, model: str, gpus: int) -> float:
        """How many times as long a step takes on several hosts; 1 where that was not measured."""
        spread = self.spread_steps_per_s.get((model, gpus))
        return max(1.0, self.steps_per_s[model, gpus] / spread) if spread and gpus > 1 else 1.0

    def batches(self, model: str, gpus: int) -> list[tuple[int, float]]:
        """(batch, steps per second) of the same model with the same number of GPUs, small batches first."""
        family = _BATCH.fullmatch(model)
        if family is None:
            return []
        found: list[tuple[int, float]] = []
        for (name, count), speed in self.steps_per_s.items():
            other = _BATCH.fullmatch(name)
            if other is not None and other[1] == family[1] and count == gpus:
                found.append((int(other[2]), speed))
        return sorted(found)


def split_batch(model: str) -> tuple[str, int]:
    """A model's name without the batch size that it tells, and that size, or 1."""
    found = _BATCH.fullmatch(model)
    return (found[1], int(found[2])) if found else (model, 1)


def _add(line: Line, found: dict[str, dict[tuple[str, int], float]]) -> None:
    worker_type = line.text("worker_type")
    speed = line.number("steps_per_s")
    if worker_type in found and speed > 0:
        key = (line.text("model"), line.whole("gpus"))
        if key in found[worker_type]:
            raise UsageError(f"{line.where}: {key[0]} on {key[1]} GPUs occurs twice. Keep one line.")
        found[worker_type][key] = speed
