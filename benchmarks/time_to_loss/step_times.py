"""What a step takes under each strategy behind each link, as `laconic compare` measures it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.time_to_loss.contender import Contender
from laconic.errors import UsageError
from laconic.strategy import Strategy

DDP = "torch DDP"


def measure(
    strategies: Sequence[str], bandwidths: Sequence[str], *, size: str, batch: int, steps: int, folder: Path
) -> dict[tuple[str, str], float]:
    """(link, strategy) -> seconds per step; a strategy that begins otherwise has a row for that, see `first_of`."""
    wanted = dict.fromkeys(
        text for strategy in strategies for text in (steady_of(strategy), first_of(strategy)) if text
    )
    command = [sys.executable, "-m", "laconic", "compare", *wanted, "--size", size, "--batch", str(batch), "--json"]
    command += ["--steps", str(steps), "--output", str(folder)]
    command += [word for rate in bandwidths for word in ("--bandwidth", rate)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if ran.returncode != 0:
        raise UsageError(f"laconic compare ended with {ran.returncode}; see above.")
    rows = json.loads(ran.stdout)["rows"]
    return {(row["link"], _canonical(row["strategy"])): row["step_ms"] / 1e3 for row in rows}


def _canonical(strategy: str) -> str:
    return strategy if strategy == DDP else str(Strategy.parse(strategy))


def steady_of(strategy: str) -> str:
    """What is timed for a strategy: the steps that it is made of after its beginning; with AdamW, as it is compared."""
    parsed = Contender.parse(strategy).strategy()
    if not parsed.synchronization.beginning:
        return str(parsed)
    # The same bytes by the same way, in every step from the first on.
    return str(Strategy(compression=parsed.compression, architecture=parsed.architecture, scheduling=parsed.scheduling))


def first_of(strategy: str) -> str:
    """What is timed for the steps in which a synchronization has another compressor in place; empty: there are none."""
    parsed = Contender.parse(strategy).strategy()
    first = parsed.synchronization.beginning
    return str(Strategy.parse(f"bsp / {parsed.architecture} / {first} / {parsed.scheduling}")) if first else ""


def seconds_until(strategy: str, step: int, total_steps: int, steady_s: float, first_s: float | None) -> float:
    """Training time of the first `step` steps."""
    if first_s is None:
        return step * steady_s
    rule = Contender.parse(strategy).strategy().planned(total_steps).synchronization
    return sum(first_s if rule.begins(number) else steady_s for number in range(step))
