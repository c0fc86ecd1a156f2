"""Local updates whose rounds may end by time, so that fast and slow ranks stop together."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.errors import InvalidSetting
from laconic.settings import duration
from laconic.synchronization.contract import LocalUpdates


@dataclass(frozen=True, kw_only=True)
class TimedLocalUpdates(LocalUpdates):
    """Replicas train alone for `period` steps or `seconds`, whichever ends first, then make an outer step.

        d = sum_i n_i (x_old - x_i) / sum_i n_i        n_i: the steps that replica i has made

    Each rank measures the time by itself, from the end of the last round. Before the mean is taken, all ranks tell each
    other their n_i.
    """

    seconds: float = duration(0.0)
    """A round also ends after so many seconds, and ranks are weighted by the steps they have made. 0: only by steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seconds and self.period == 1:
            raise InvalidSetting(
                f"{self.axis}.{self.name}.seconds has no effect with period=1, where every round ends after one step. "
                "Leave seconds out, or give a longer period."
            )

    @property
    def deadline_s(self) -> float | None:
        return self.seconds or None
