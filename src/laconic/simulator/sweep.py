"""Many simulations: every strategy on every cluster with every number of workers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from laconic.cluster import Cluster
from laconic.cluster.place import Setting
from laconic.errors import LaconicError, UsageError, one_line
from laconic.simulator.network import Network
from laconic.simulator.network.analytic import AnalyticNetwork
from laconic.simulator.network.flow import FlowNetwork
from laconic.simulator.prediction import Prediction
from laconic.simulator.simulation import Conditions, Simulation, simulate
from laconic.strategy import Strategy
from laconic.workload import Workload

Fidelity = Literal["analytic", "flow"]

_MOST_WORKERS = 1_000_000
_MOST_COUNTS = 1000
_COUNTS = re.compile(r"(\d{1,9})(?:\.\.(\d{1,9})(?:\.\.(\d{1,9}))?)?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One strategy in one setting: predicted, or refused."""

    strategy: Strategy
    setting: Setting
    prediction: Prediction | None
    refused: str = ""
    """Why the strategy cannot run there; empty if it can."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep: every strategy in every setting, in the order given."""

    strategies: tuple[Strategy, ...]
    workload: Workload
    settings: tuple[Setting, ...]
    fidelity: Fidelity = "analytic"
    conditions: Conditions = field(default_factory=Conditions)

    def __len__(self) -> int:
        return len(self.strategies) * len(self.settings)

    def rows(self) -> Iterator[Row]:
        """The rows, each as soon as it is done."""
        return (row for row, _ in self.simulations())

    def simulations(self) -> Iterator[tuple[Row, Simulation | None]]:
        """The rows, each with the simulation behind it; None where the strategy is refused."""
        for setting in self.settings:
            network = network_of(setting.cluster, self.fidelity)
            for strategy in self.strategies:
                yield self._simulated(strategy, setting, network)

    def _simulated(self, strategy: Strategy, setting: Setting, network: Network) -> tuple[Row, Simulation | None]:
        try:
            found = simulate(
                strategy,
                self.workload,
                setting.cluster,
                workers=setting.workers,
                network=network,
                conditions=self.conditions,
            )
        except LaconicError as exc:
            # If one strategy does not fit, others still may.
            return Row(strategy=strategy, setting=setting, prediction=None, refused=one_line(exc, 2000)), None
        return Row(strategy=strategy, setting=setting, prediction=found.prediction), found


def network_of(cluster: Cluster, fidelity: Fidelity) -> Network:
    """The network model of the cluster: formulas and measured tables, or flows on its links."""
    return AnalyticNetwork(cluster) if fidelity == "analytic" else FlowNetwork(cluster)


def parse_counts(text: str, where: str) -> tuple[int, ...]:
    """Numbers of workers: 8, or 4,8,16, or 4..64 (each twice the one before), or 4..64..4 (each 4 more)."""
    found: dict[int, None] = {}
    for part in text.split(","):
        match = _COUNTS.fullmatch(part.strip())
        if match is None:
            raise UsageError(
                f'{where} must be a number, a list such as 4,8,16 or a range such as 4..64 or 4..64..4, got "'
                f'{one_line(text, 60)}".'
            )
        first, last, step = (None if number is None else int(number) for number in match.groups())
        assert first is not None
        found |= dict.fromkeys(_range(first, first if last is None else last, step, where))
        if len(found) > _MOST_COUNTS:
            raise UsageError(f'{where} must give at most {_MOST_COUNTS} numbers, got "{one_line(text, 60)}".')
    return tuple(found)


def _range(first: int, last: int, step: int | None, where: str) -> Sequence[int]:
    if not 1 <= first <= last <= _MOST_WORKERS:
        raise UsageError(
            f"{where} must lie between 1 and {_MOST_WORKERS:,}, and a range begin with its smaller end, got "
            f"{first if first == last else f'{first}..{last}'}."
        )
    if step is not None:
        if step < 1:
            raise UsageError(f"{where}: the step of a range must be at least 1, got {step}.")
        return range(first, last + 1, step)[: _MOST_COUNTS + 1]
    doubled = [first << power for power in range((last // first).bit_length())]
    return doubled if doubled[-1] == last else [*doubled, last]
