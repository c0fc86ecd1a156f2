"""Who trains: a strategy and its optimizer, written as `STRATEGY` (AdamW) or `STRATEGY with muon`."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.convergence.recipe import OptimizerName
from laconic.errors import UsageError
from laconic.strategy import Strategy

_WITH = " with "


@dataclass(frozen=True)
class Contender:
    """The two parts of its name."""

    name: str
    """A strategy, or another training that the benchmark knows by name."""
    optimizer: OptimizerName

    @classmethod
    def parse(cls, text: str) -> Contender:
        """Split `text`; whether there is such a strategy is not looked at."""
        name, found, optimizer = text.partition(_WITH)
        if found and optimizer != "muon":
            raise UsageError(f'"{text}": the only other optimizer is muon: write "{name}{_WITH}muon".')
        return cls(name, "muon" if found else "adamw")

    def strategy(self) -> Strategy:
        """Its strategy; raises if there is none of this name, or if the strategy needs another optimizer."""
        strategy = Strategy.parse(self.name)
        if self.optimizer == "muon" and not strategy.synchronization.keeps_scale:
            raise UsageError(
                f'"{self.name}{_WITH}muon": {strategy.synchronization.name} gives the optimizer directions of length '
                f'one, which SGD applies. Write "{self.name}".'
            )
        return strategy

    def optimizer_for(self, strategy: Strategy | None) -> OptimizerName:
        """The optimizer that trains under `strategy`: a direction of length one is applied by SGD as it is."""
        directions = strategy is not None and not strategy.synchronization.keeps_scale
        return "sgd" if directions else self.optimizer
