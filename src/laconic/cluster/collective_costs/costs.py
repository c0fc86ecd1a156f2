"""The time of any collective operation on a measured system.

Between sizes: straight lines (curve.py). Between and beyond numbers of GPUs: an operation runs in steps (operations.py)
each of which moves one chunk, so at a fixed chunk its time is a line in the number of steps:

    t(n, n c) = base(c) + steps(n) * step(c)

Two measured numbers of GPUs give base and step at every chunk. Where the rate falls by more than a fifth from the
smaller number to the larger, the larger has reached a slower link (another socket, the host's memory), which paces
every step from then on; the step is then taken from the larger number alone, and the base from the start-ups.

Switches that add up (NVLink SHARP) replace the ring of an all-reduce where that is faster. Each GPU sends its buffer
once and its part of the sum once more:

    t = (bytes + ramp) (1 + 1 / n) / (in_switch_ratio * rate of the ring)

The ramp is what an H100 node loses at first: 8 GPUs take 322 us for 64 MiB where the plateau is 275 GB/s (Vidur's
profiles of a DGX H100; nccl-tests, issue 212).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from laconic.cluster.collective_costs.between_nodes import NodeLink, between_s, hops_s
from laconic.cluster.collective_costs.curve import SizeCurve
from laconic.cluster.collective_costs.operations import Operation, operation
from laconic.cluster.collective_costs.systems import System, system
from laconic.errors import UsageError
from laconic.units import human_bytes

MOST_GPUS = 1 << 20
_SLOWER_LINK = 0.8
"""A rate below this share of the rate among fewer GPUs belongs to another link."""
_RAMP_BYTES = 322e-6 * 275e9 - (1 << 26)


@dataclass(frozen=True)
class CollectiveTime:
    """A time, and the extrapolations it is based on."""

    seconds: float
    warnings: tuple[str, ...] = ()


class CollectiveCosts:
    """Looks up and extrapolates the times of one system; records extrapolations."""

    def __init__(self, measured: System | str, *, node_link: NodeLink | None = None) -> None:
        self.system = system(measured) if isinstance(measured, str) else measured
        self.node_link = node_link or self.system.node_link
        self._derived: dict[tuple[str, int], SizeCurve] = {}
        self._warnings: dict[str, None] = {}

    def warnings(self) -> list[str]:
        """All requests so far beyond the measured range."""
        return list(self._warnings)

    def seconds(self, name: str, nbytes: float, gpus: int, nodes: int = 1) -> float:
        """The time of an operation alone; extrapolations are recorded in `warnings`, not returned."""
        return self.estimate(name, nbytes, gpus, nodes).seconds

    def estimate(self, name: str, nbytes: float, gpus: int, nodes: int = 1) -> CollectiveTime:
        """The time of an operation on `nbytes` (operations.py says of what) among `gpus` on `nodes`, spread evenly."""
        chosen = operation(name)
        _check(nbytes, gpus, nodes)
        if gpus == 1 or nbytes == 0:
            return CollectiveTime(0.0)
        found: list[str] = []
        per_node = gpus // nodes
        if name == "send":
            per_node = 2 if nodes == 1 else 1
        inside_s = self._inside_s(chosen, nbytes, per_node, found) if per_node > 1 else 0.0
        if nodes == 1:
            time = CollectiveTime(inside_s, tuple(found))
        else:
            if self.node_link is None:
                raise UsageError(
                    f"nothing is known about the network between nodes of {self.system.name}. Pass node_link."
                )
            found.append(
                f"{self.system.name}: {name} between {nodes} nodes follows from the rate of the NICs; "
                "only one node was measured."
            )
            beyond_s = between_s(chosen, nbytes, gpus, nodes, self.node_link)
            time = CollectiveTime(max(inside_s, beyond_s) + hops_s(chosen, nodes, self.node_link), tuple(found))
        self._warnings.update(dict.fromkeys(time.warnings))
        return time

    def curve(self, name: str, gpus: int) -> SizeCurve:
        """The times by size among this many GPUs of one node, measured or derived; without in-switch sums."""
        by_gpus = self._measured(name)
        if gpus in by_gpus:
            return by_gpus[gpus]
        if (name, gpus) not in self._derived:
            self._derived[name, gpus] = _by_steps(operation(name), by_gpus, gpus)
        return self._derived[name, gpus]

    def _inside_s(self, chosen: Operation, nbytes: float, gpus: int, found: list[str]) -> float:
        name = chosen.name
        if name == "send":  # half of an exchange between two
            name, nbytes, gpus = "all_to_all", 2 * nbytes, 2
        elif name == "broadcast":  # the same hops and bytes per link as an all-gather of a larger buffer
            name, nbytes = "all_gather", nbytes * gpus / (gpus - 1)
        if name == "all_to_all" and name not in self.system.curves:
            found.append(f"{self.system.name}: all_to_all was not measured; it is taken to cost as much as all_gather.")
            name = "all_gather"  # the same steps and bytes per GPU
        by_gpus = self._measured(name)
        if gpus not in by_gpus:
            counts = " and ".join(map(str, sorted(by_gpus)))
            how = "extrapolated" if gpus > max(by_gpus) else "interpolated"
            found.append(f"{self.system.name}: {name} among {gpus} GPUs is {how} from {counts}.")
        curve = self.curve(name, gpus)
        if nbytes > curve.sizes[-1]:
            found.append(
                f"{self.system.name}: {name} of more than {human_bytes(int(curve.sizes[-1]))} is extrapolated at the "
                "rate of the largest sizes."
            )
        ring_s = curve.at(nbytes)
        if name != "all_reduce" or self.system.in_switch_ratio == 0 or gpus <= max(by_gpus):
            return ring_s
        rate = curve.plateau_bytes_per_s * operation(name).sent_bytes(1, gpus) * self.system.in_switch_ratio
        return min(ring_s, (nbytes + _RAMP_BYTES) * (1 + 1 / gpus) / rate)

    def _measured(self, name: str) -> Mapping[int, SizeCurve]:
        by_gpus = self.system.curves.get(name)
        if by_gpus is None:
            known = ", ".join(self.system.curves)
            raise UsageError(f"{name} was not measured on {self.system.name}. Measured: {known}.")
        return by_gpus


def _by_steps(chosen: Operation, by_gpus: Mapping[int, SizeCurve], gpus: int) -> SizeCurve:
    """The curve among `gpus`, from the two measured numbers of GPUs that are nearest."""
    counts = sorted(by_gpus, key=lambda count: (abs(count - gpus), count))[:2]
    few, many = min(counts), max(counts)
    chunks = sorted({size / count for count in counts for size in by_gpus[count].sizes})
    if few == many:
        per_step = [by_gpus[many].at(chunk * many) / chosen.steps(many) for chunk in chunks]
        return SizeCurve.fitted([chunk * gpus for chunk in chunks], [time * chosen.steps(gpus) for time in per_step])
    low, high = by_gpus[few], by_gpus[many]
    low_rate = low.plateau_bytes_per_s * chosen.sent_bytes(1, few)
    high_rate = high.plateau_bytes_per_s * chosen.sent_bytes(1, many)
    steps = (chosen.steps(few), chosen.steps(many), chosen.steps(gpus))
    if gpus > many and high_rate < _SLOWER_LINK * low_rate:
        base = max(0.0, _line(steps[:2], (low.startup_s, high.startup_s), 0))
        times = [base + max(0.0, high.at(chunk * many) - base) * steps[2] / steps[1] for chunk in chunks]
    else:
        times = [_line(steps[:2], (low.at(chunk * few), high.at(chunk * many)), steps[2]) for chunk in chunks]
    # More steps never take less time than the measured ones on the way there.
    floor = [high.at(chunk * many) if gpus > many else low.at(chunk * few) if gpus > few else 0.0 for chunk in chunks]
    times = [max(time, least, math.ulp(1.0)) for time, least in zip(times, floor, strict=True)]
    return SizeCurve.fitted([chunk * gpus for chunk in chunks], times)


def _line(steps: tuple[int, ...], times: tuple[float, float], at: int) -> float:
    slope = (times[1] - times[0]) / (steps[1] - steps[0])
    return times[0] + slope * (at - steps[0])


def _check(nbytes: float, gpus: int, nodes: int) -> None:
    if not (math.isfinite(nbytes) and nbytes >= 0):
        raise UsageError(f"the number of bytes must be at least 0 and finite, got {nbytes:g}.")
    if not 1 <= gpus <= MOST_GPUS:
        raise UsageError(f"the number of GPUs must be from 1 to {MOST_GPUS}, got {gpus}.")
    if nodes < 1 or gpus % nodes:
        nearest = max(1, round(gpus / max(1, nodes))) * max(1, nodes)
        raise UsageError(
            f"{gpus} GPUs cannot be spread evenly over {nodes} nodes. Use {nearest} GPUs, or more or fewer nodes."
        )
