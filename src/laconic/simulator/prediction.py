"""The result of a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field

from laconic.core.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The spread of step times when compute times vary."""

    low_s: float
    """5% of steps are shorter."""
    median_s: float
    high_s: float
    """5% of steps are longer."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One strategy on one workload and one cluster."""

    strategy: str
    workload: str
    cluster: str
    workers: int
    step_s: float
    """Duration of a steady step, averaged over the steps that repeat."""
    compute_s: float
    """Compute time of a rank in a step. If ranks differ: that of the slowest, or without a barrier the time in which
    all ranks together compute the samples of one step."""
    samples_per_s: float
    wire_bytes: int
    """Payload bytes one rank sends per step."""
    busy: dict[str, float] = field(default_factory=dict)
    """Share of the steps' time in which each part of the network is busy."""
    because: tuple[tuple[str, float], ...] = ()
    """How the steps' time is spent along the critical path: words and share, the largest first."""
    spread: Spread | None = None
    plans: tuple[Plan, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def exposed_s(self) -> float:
        """Communication that compute waits for, per step."""
        return max(0.0, self.step_s - self.compute_s)

    @property
    def efficiency(self) -> float:
        """Samples per second, relative to workers that do not communicate."""
        return min(1.0, self.compute_s / self.step_s) if self.step_s else 1.0

    def in_words(self) -> str:
        """The critical path in a sentence."""
        parts = [f"{share:.0%} {words}" for words, share in self.because[:3] if share >= 0.01]
        return f"Of a step {', '.join(parts)}." if parts else "A step takes no time."

    def as_json(self) -> dict[str, object]:
        """Everything but the plans, for programs."""
        spread = self.spread
        return {
            "strategy": self.strategy,
            "workload": self.workload,
            "cluster": self.cluster,
            "workers": self.workers,
            "step_s": self.step_s,
            "compute_s": self.compute_s,
            "exposed_s": self.exposed_s,
            "samples_per_s": self.samples_per_s,
            "efficiency": self.efficiency,
            "wire_bytes": self.wire_bytes,
            "busy": dict(self.busy),
            "critical_path": [{"what": words, "share": share} for words, share in self.because],
            "spread_s": None if spread is None else [spread.low_s, spread.median_s, spread.high_s],
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True, kw_only=True)
class Shared:
    """One of several jobs on one fabric."""

    strategy: str
    workload: str
    alone_s: float
    """The step time with the fabric to itself."""
    together_s: float
    """The step time when all jobs run."""

    @property
    def slowdown(self) -> float:
        """The factor by which the other jobs lengthen a step."""
        return self.together_s / self.alone_s if self.alone_s else 1.0
