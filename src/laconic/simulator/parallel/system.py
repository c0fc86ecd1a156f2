"""The job and the hardware."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.errors import ConfigurationError
from laconic.simulator.parallel.accelerator import Accelerator
from laconic.simulator.parallel.fabric import Fabric
from laconic.simulator.parallel.software import Software
from laconic.workload.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class Job:
    """The model, the length of its sequences, and the number of sequences per step."""

    model: Transformer
    sequence: int
    global_batch: int

    def __post_init__(self) -> None:
        for key in ("sequence", "global_batch"):
            if getattr(self, key) < 1:
                raise ConfigurationError(f"{key} must be at least 1, got {getattr(self, key)}.")

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.sequence * self.global_batch


@dataclass(frozen=True, kw_only=True)
class System:
    """The hardware and software of a job."""

    accelerator: Accelerator
    fabric: Fabric
    software: Software
