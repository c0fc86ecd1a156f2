"""Local SGD with a period that becomes shorter as the loss falls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import torch

from laconic.core.stateful import BucketState, Resize
from laconic.errors import CommunicationError
from laconic.settings import count
from laconic.synchronization.contract import LocalUpdates

_TIMETABLE = "adacomm.timetable"
_LOSSES = "adacomm.losses"


class _Timetable(NamedTuple):
    """How far training has come; kept with every parameter, so that it is saved and loaded with the rest."""

    rounds: int = 0
    last: int = 0
    """Steps that were complete at the last round."""
    period: int = 0
    """H after that round; 0: H_0."""
    first_loss: float = 0.0
    """F_0; 0: not known yet."""


@dataclass(frozen=True, kw_only=True)
class AdaComm(LocalUpdates):
    """Train alone for a period, then average parameters; the period becomes shorter as the loss falls.

        x_i <- mean_j(x_j)   every H steps,      after a round   H <- min(H_0, ceil(sqrt(F / F_0) H_0))

    F is the mean of the losses that all replicas have reported with session.report_loss(loss) since the previous round,
    and F_0 that of the first round. Early on, where every step gains much, replicas hardly wait for each other; towards
    the end, where the noise between replicas dominates, they average often. For losses above zero, such as cross
    entropy. A loss that is not finite leaves the period as it is.

    Bytes are predicted for the period in force. The simulator takes H_0, the period of the beginning.

    Reference: Wang & Joshi 2019, arXiv:1810.08313, which decides anew after equal times, and halves a period that would
    not become shorter.
    """

    name: ClassVar[str] = "adacomm"
    asks_for_loss: ClassVar[bool] = True
    whole_fields: ClassVar[Mapping[str, Resize]] = {_TIMETABLE: "copy", _LOSSES: "sum"}
    losses_field: ClassVar[str] = _LOSSES

    period: int = count(32, at_least=2, advice='To average every step use "bsp".')
    """H_0: optimizer steps before the first round, and the longest period."""
    timetable: _Timetable = _Timetable()

    @property
    def interval(self) -> int:
        return self.timetable.period or self.period

    def due(self, num_steps: int) -> list[int]:
        since = num_steps - self.timetable.last
        return [0] if since > 0 and since % self.interval == 0 else []

    def round_number(self, step: int) -> int:
        return self.timetable.rounds + max(0, step - self.timetable.last) // self.interval

    def after_round(self, num_steps: int, loss: float) -> Self:
        """The same rule, with the period that follows from the loss."""
        now = self.timetable._replace(rounds=self.round_number(num_steps), last=num_steps, period=self.interval)
        if not math.isfinite(loss):
            return replace(self, timetable=now)
        first_loss = now.first_loss or loss
        if first_loss <= 0:
            raise CommunicationError(
                f"synchronization.{self.name} compares the loss with that of the first round, which must be > 0, got "
                f'{first_loss:g}. Report a loss that cannot be negative, such as cross entropy, or use "local_sgd".'
            )
        wanted = math.ceil(math.sqrt(max(0.0, loss) / first_loss) * self.period)
        return replace(self, timetable=now._replace(period=min(self.period, max(1, wanted)), first_loss=first_loss))

    def init(self, state: BucketState) -> None:
        super().init(state)
        state.whole |= {_TIMETABLE: {}, _LOSSES: {}}
        for tensor in state.bucket.tensors:
            state.whole[_LOSSES][tensor.name] = torch.zeros(2, dtype=torch.float64, device=state.bucket.device)
        self.note(state)

    def note(self, state: BucketState) -> None:
        for tensor in state.bucket.tensors:
            numbers = torch.tensor(self.timetable, dtype=torch.float64, device=state.bucket.device)
            state.whole[_TIMETABLE][tensor.name] = numbers

    def noted(self, state: BucketState) -> Self:
        rounds, last, period, first_loss = next(iter(state.whole[_TIMETABLE].values())).tolist()
        return replace(self, timetable=_Timetable(int(rounds), int(last), int(period), first_loss))

    def outer(self, anchor: torch.Tensor, change: torch.Tensor, memory: dict[str, torch.Tensor], rate: float) -> None:
        anchor -= change
