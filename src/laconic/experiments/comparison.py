"""Train the same model on the same batches under several strategies, taking turns in one job, side by side."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from laconic.errors import UsageError
from laconic.experiments.small_gpt import gpt_shape
from laconic.experiments.text import load_text
from laconic.experiments.training import TORCH_DDP, TrainingConfig, TrainingResult
from laconic.lab.launch import places_here, run_ranks
from laconic.strategy import Strategy

DEFAULT_STRATEGIES: tuple[str, ...] = (
    "ddp",
    "ddp-bf16",
    "bsp / all_reduce / bf16 + error_feedback",
    "wfbp-a2a",
    "bsp-a2a",
)
_STEP_LINE = re.compile(r"contender (\d+) step (\d+) loss (\S+) (\S+) ms")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What to compare."""

    strategies: tuple[str, ...] = DEFAULT_STRATEGIES
    workers: int = 2
    steps: int = 30
    size: str = "small"
    batch: int = 4
    learning_rate: float = 1e-3
    seed: int = 0
    data: str | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for name, least in (("workers", 1), ("steps", 1), ("batch", 1), ("timeout_s", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"compare: {name} must be >= {least}, got {getattr(self, name)}.")
        if not self.strategies:
            raise UsageError("compare: give at least one strategy.")
        gpt_shape(self.size)
        for strategy in self.strategies:
            Strategy.parse(strategy)
        load_text(self.data)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One strategy beside the baseline."""

    strategy: str
    step_ms: float
    step_ms_low: float
    step_ms_high: float
    exposed_ms: float
    wire_bytes_per_step: int | None
    predicted_bytes_per_step: int | None
    final_loss: float
    speedup_over_ddp: float


Progress = Callable[[str, int, float, float], None]
"""Called with the strategy, the step, its loss and its time in milliseconds."""


def run_comparison(comparison: Comparison, progress: Progress) -> list[Row]:
    """Run torch DDP and every strategy; rows in that order."""
    # Two spellings of one strategy would be one contender twice.
    names = list(dict.fromkeys([TORCH_DDP, *(str(Strategy.parse(text)) for text in comparison.strategies)]))
    results = _train(comparison, names, progress)
    return [_row(result, results[0]) for result in results]


def _row(result: TrainingResult, baseline: TrainingResult) -> Row:
    return Row(
        strategy=result.strategy,
        step_ms=result.step_ms,
        step_ms_low=result.step_ms_low,
        step_ms_high=result.step_ms_high,
        exposed_ms=result.exposed_ms,
        wire_bytes_per_step=result.wire_bytes_per_step,
        predicted_bytes_per_step=result.predicted_bytes_per_step,
        final_loss=_tail_mean(result.losses),
        speedup_over_ddp=baseline.step_ms / result.step_ms,
    )


def _tail_mean(losses: Sequence[float]) -> float:
    """The mean of the last tenth: one batch alone is noise."""
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / len(tail)


def _train(comparison: Comparison, names: list[str], progress: Progress) -> list[TrainingResult]:
    with tempfile.TemporaryDirectory(prefix="laconic-") as folder:
        out, config_path = Path(folder) / "result.json", Path(folder) / "config.json"
        config = TrainingConfig(
            contenders=names,
            steps=comparison.steps,
            size=comparison.size,
            batch=comparison.batch,
            learning_rate=comparison.learning_rate,
            seed=comparison.seed,
            data=comparison.data,
            out=str(out),
        )
        config.write(config_path)

        def on_line(rank: int, line: str) -> None:
            step = _STEP_LINE.fullmatch(line)
            if rank == 0 and step is not None:
                progress(names[int(step[1])], int(step[2]), float(step[3]), float(step[4]))

        run_ranks(
            [sys.executable, "-m", "laconic.experiments.training", str(config_path)],
            places_here(comparison.workers),
            timeout_s=comparison.timeout_s,
            # One thread per rank: ranks that fight for cores would measure the scheduler, not the strategy.
            environment={"OMP_NUM_THREADS": "1"},
            on_line=on_line,
        )
        return [TrainingResult(**result) for result in json.loads(out.read_text(encoding="utf-8"))]


def as_document(comparison: Comparison, rows: Sequence[Row]) -> dict[str, object]:
    """Configuration and rows, ready to be written as JSON."""
    return {"config": asdict(comparison), "rows": [asdict(row) for row in rows]}
