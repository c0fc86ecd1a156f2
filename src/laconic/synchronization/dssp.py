"""Stale-synchronous training whose bound follows the workers' pace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from laconic.errors import InvalidSetting
from laconic.settings import choice, count
from laconic.synchronization.contract import Asynchronous, Pace


@dataclass(frozen=True, kw_only=True)
class Dssp(Asynchronous):
    """The fastest worker may be ahead of the slowest by `staleness` steps, and by more where it would wait for long.

        worker i goes on after step c   when   c - min_j(c_j) <= staleness + r,   staleness + r <= most
        r = argmin_r min_k |(t_i + r T_i) - (t_s + k T_s)|,   k = 1, 2, ...

    t is the time of a worker's last gradient and T the time of its last step; s is the slowest worker. So the fastest
    makes r more steps and then stops about when a gradient of the slowest arrives, not long before; it continues when
    it is within `staleness` again. Only the fastest gets more steps, and only once both paces are known. The server
    keeps clocks and times.

    Reference: Zhao et al. 2019, arXiv:1908.11848, where T is the time between two gradients, waits included.
    """

    name: ClassVar[str] = "dssp"
    partners: ClassVar[Mapping[str, str]] = {"architecture": "parameter_server"}
    needs_clocks: ClassVar[bool] = True

    staleness: int = count(3)
    """The number of steps by which the fastest worker may always be ahead of the slowest."""
    most: int = count(15, at_least=1)
    """The largest number of steps by which the fastest worker may ever be ahead."""
    learning_rate: str = choice("mean", "full")
    """mean: divided by the number of workers, so that one gradient of each moves parameters as far as their mean.
    full: that of the optimizer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most <= self.staleness:
            raise InvalidSetting(
                f"{self.axis}.{self.name}.most must be > staleness ({self.staleness}), got {self.most}. For a bound "
                f'that stays the same use "ssp(staleness={self.staleness})".'
            )

    @property
    def lead(self) -> int | None:
        return self.most

    @property
    def sure_lead(self) -> int | None:
        return self.staleness

    def more_steps(self, fastest: Pace, slowest: Pace, room: int) -> int:
        def wait_s(steps: int) -> float:
            stops_s = fastest.last_s + steps * fastest.step_s - slowest.last_s
            arrivals = max(1, round(stops_s / slowest.step_s)) if slowest.step_s > 0 else 1
            return abs(stops_s - arrivals * slowest.step_s)

        return min(range(room + 1), key=wait_s)

    def rate(self, world_size: int, staleness: int) -> float:
        return 1 / world_size if self.learning_rate == "mean" else 1.0
