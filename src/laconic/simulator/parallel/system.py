"""The job and the hardware."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.errors import ConfigurationError
from laconic.simulator.parallel.accelerator import Accelerator
from laconic.simulator.parallel.fabric import Fabric
from laconic.simulator.parallel.software import Software
from laconic.workload.transformer import Transformer

_MOST = 10**9


@dataclass(frozen=True, kw_only=True)
class Job:
    """The model, the length of its sequences, and the number of sequences per step."""

    model: Transformer
    sequence: int
    global_batch: int

    def __post_init__(self) -> None:
        for key in ("sequence", "global_batch"):
            if not 1 <= getattr(self, key) <= _MOST:
                bound = "at least 1" if getattr(self, key) < 1 else f"at most {_MOST}"
                raise ConfigurationError(f"{key} must be {bound}, got {getattr(self, key)}.")

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
