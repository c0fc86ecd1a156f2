"""Train the same model on the same batches under several strategies, taking turns in one job, link by link."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from laconic.cluster import Cluster, Link
from laconic.errors import UsageError
from laconic.experiments.small_gpt import gpt_shape
from laconic.experiments.text import load_text
from laconic.experiments.training import TORCH_DDP, TrainingConfig, TrainingResult
from laconic.lab.launch import Place, places_here, run_ranks
from laconic.lab.virtual_hosts import VirtualHosts, places_on
from laconic.strategy import Strategy
from laconic.units import format_rate

DEFAULT_STRATEGIES: tuple[str, ...] = (
    "ddp",
    "ddp-bf16",
    "ddp-bf16-ef",
    "wfbp-a2a",
    "bsp-a2a",
)
_STEP_LINE = re.compile(r"contender (\d+) step (\d+) loss (\S+) (\S+) ms")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What to compare."""

    strategies: tuple[str, ...] = DEFAULT_STRATEGIES
    hosts: int = 4
    bandwidths_bps: tuple[float, ...] = (100e6,)
    """One comparison for each; empty: processes side by side on this machine, without a limit."""
    steps: int = 20
    size: str = "small"
    batch: int = 2
    learning_rate: float = 1e-3
    seed: int = 0
    data: str | None = None
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        for name, least in (("hosts", 1), ("steps", 1), ("batch", 1), ("timeout_s", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"compare: {name} must be >= {least}, got {getattr(self, name)}.")
        if not self.strategies:
            raise UsageError("compare: give at least one strategy.")
        for bandwidth_bps in self.bandwidths_bps:
            Cluster.uniform(self.hosts, Link(bandwidth_bps=bandwidth_bps))
        gpt_shape(self.size)
        for strategy in self.strategies:
            Strategy.parse(strategy)
        load_text(self.data)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One strategy on one link, beside the baseline."""

    strategy: str
    link: str
    links: Literal["shaped", "unlimited"]
    step_ms: float
    step_ms_low: float
    step_ms_high: float
    exposed_ms: float
    wire_bytes_per_step: int | None
    counted_bytes_per_step: int | None
    predicted_bytes_per_step: int | None
    final_loss: float
    speedup_over_ddp: float


Progress = Callable[[str, str, int, float, float], None]
"""Called with the link, the strategy, the step, its loss and its time in milliseconds."""


def run_comparison(comparison: Comparison, progress: Progress) -> list[Row]:
    """Run torch DDP and every strategy on every link; rows in that order."""
    # Two spellings of one strategy would be one contender twice.
    names = list(dict.fromkeys([TORCH_DDP, *(str(Strategy.parse(text)) for text in comparison.strategies)]))
    if not comparison.bandwidths_bps:
        return _rows("unlimited", _train(comparison, "unlimited", names, places_here(comparison.hosts), progress))
    rows: list[Row] = []
    for bandwidth_bps in comparison.bandwidths_bps:
        link = format_rate(bandwidth_bps)
        with VirtualHosts(Cluster.uniform(comparison.hosts, Link(bandwidth_bps=bandwidth_bps))) as hosts:
            rows += _rows(link, _train(comparison, link, names, places_on(hosts), progress))
    return rows


def _rows(link: str, results: list[TrainingResult]) -> list[Row]:
    return [
        Row(
            strategy=result.strategy,
            link=link,
            links="unlimited" if link == "unlimited" else "shaped",
            step_ms=result.step_ms,
            step_ms_low=result.step_ms_low,
            step_ms_high=result.step_ms_high,
            exposed_ms=result.exposed_ms,
            wire_bytes_per_step=result.wire_bytes_per_step,
            counted_bytes_per_step=result.counted_bytes_per_step,
            predicted_bytes_per_step=result.predicted_bytes_per_step,
            final_loss=_tail_mean(result.losses),
            speedup_over_ddp=results[0].step_ms / result.step_ms,
        )
        for result in results
    ]


def _tail_mean(losses: Sequence[float]) -> float:
    """The mean of the last tenth: one batch alone is noise."""
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / len(tail)


def _train(
    comparison: Comparison, link: str, names: list[str], places: Sequence[Place], progress: Progress
) -> list[TrainingResult]:
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
                progress(link, names[int(step[1])], int(step[2]), float(step[3]), float(step[4]))

        run_ranks(
            [sys.executable, "-m", "laconic.experiments.training", str(config_path)],
            places,
            timeout_s=comparison.timeout_s,
            # One thread per rank: ranks that fight for cores would measure the scheduler, not the strategy.
            environment={"OMP_NUM_THREADS": "1"},
            on_line=on_line,
        )
        return [TrainingResult(**result) for result in json.loads(out.read_text(encoding="utf-8"))]


def as_document(comparison: Comparison, rows: Sequence[Row]) -> dict[str, object]:
    """Configuration and rows, ready to be written as JSON."""
    return {"config": asdict(comparison), "rows": [asdict(row) for row in rows]}
