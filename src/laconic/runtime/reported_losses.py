"""The losses that a training loop reports, for strategies that decide by them."""

from __future__ import annotations

import torch

from laconic.core.exchange import one_round
from laconic.core.transport import Transport
from laconic.errors import CommunicationError
from laconic.runtime.engine import Engine

_WHAT = "the losses of all ranks"


class ReportedLosses:
    """The losses of this rank since all ranks last compared theirs."""

    def __init__(self) -> None:
        self._total: torch.Tensor | float = 0.0
        self._count = 0

    def add(self, loss: torch.Tensor | float) -> None:
        """Add a loss without its graph; a tensor stays on its device, so that the host does not wait for it."""
        self._total = self._total + (loss.double() if isinstance(loss, torch.Tensor) else loss)
        self._count += 1

    def numbers(self) -> torch.Tensor:
        """The sum of the losses, and their number."""
        return torch.tensor([float(self._total), self._count], dtype=torch.float64)

    def restore(self, numbers: torch.Tensor) -> None:
        """Continue from the values that `numbers` returned."""
        self._total, count = numbers.tolist()
        self._count = int(count)

    def mean_of_all(self, transport: Transport, engine: Engine, *, step: int, asked_by: str) -> float:
        """The mean over all ranks of each rank's mean since the last call; every rank calls this and gets the same.

        Raises CommunicationError on every rank if one of them has reported nothing.
        """
        mine = self.numbers().to(transport.control_device)
        rows = torch.empty((transport.world_size, 2), dtype=torch.float64, device=transport.control_device)
        engine.call(
            _WHAT,
            lambda: one_round(transport.all_gather(rows, mine, purpose="control", what=_WHAT)),
            step=step,
            device=transport.control_device,
        )
        said = rows.tolist()
        silent = [str(rank) for rank, (_, reported) in enumerate(said) if not reported]
        if silent:
            who = "no rank has" if len(silent) == len(said) else f"rank {', '.join(silent[:8])} has not"
            raise CommunicationError(
                f"{asked_by} decides by the loss when replicas average next, and {who} reported one up to step {step}. "
                "Call session.report_loss(loss) in every step on every rank, before optimizer.step()."
            )
        self._total, self._count = 0.0, 0
        return sum(total / reported for total, reported in said) / len(said)
