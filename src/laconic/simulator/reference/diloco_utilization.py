"""The bandwidth between two datacenters that a compute utilisation needs, as the papers on DiLoCo simulate it.

The published figures are outputs of a simulator whose description is followed here. A step of t seconds runs the layers
forward in t / 3 and backward in 2 t / 3; the reduction of a layer may start when its backward pass has ended, one
reduction after the other over one link:

    round = H t + sum over synchronizations of max(0, end of the last reduction - end of the step - delay)
    utilisation = H t / round

    Data-Parallel        H = 1, all layers in every step
    DiLoCo               all layers in the last of H steps
    Streaming            fragments of a few layers, spread evenly over the depth, each once in H steps
    ... overlapped       delay = t, one inner step
    ... FP4              4 bits per parameter instead of 16

With two workers an all-reduce moves every parameter once over the link. The number sought is the bandwidth at which
the utilisation is reached. The papers print the last point below it on a grid of 50 points from 0.1 to 1000 Gbit/s,
rounded to two places and then to one.

Streaming with few steps or with a delay of a whole round is bound by the link, not by waiting. Its rows then show a
volume per step that falls with H squared, which the papers' description does not explain:

    step >= VOLUME * parameters * bits / H^2 / bandwidth

The two volumes (one inner step, one outer step) are calibrated on the 1B rows with H = 30; nothing else is fitted.

Reference: Douillard et al. 2025, arXiv:2501.18512; Kale et al. 2025, arXiv:2502.12996; Charles et al. 2025,
arXiv:2503.09799.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from laconic.errors import one_line
from laconic.simulator.reference.published import PublishedTable, Row

GRID_GBIT = tuple(0.1 * 10 ** (4 * index / 49) for index in range(50))
TARGETS = {"cu50": 0.5, "cu80": 0.8, "cu90": 0.9, "cu95": 0.95, "cu99": 0.99}
_LAYERS = {1: 24, 10: 48, 100: 108, 405: 126, 671: 61}
"""Billions of parameters -> layers, where a row does not say: the papers' own models, Llama 3 and DeepSeek-V3."""
_MOST_LAYERS = 1000
_INNER_VOLUME, _OUTER_VOLUME = 110.0, 55.0


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One method on one model."""

    parameters: float
    layers: int
    step_s: float
    period: int
    """Steps in a round."""
    fragment_layers: int | None = None
    """Layers synchronized together; None: all."""
    bits: float = 16.0
    """Per parameter."""
    overlapped: str = ""
    """"inner": the reduction may end one step later; "outer": one round later."""

    def utilization(self, bandwidth_bps: float) -> float:
        """The share of a round that is compute."""
        compute_s = self.period * self.step_s
        waiting_s = 0.0
        if self.overlapped != "outer":
            delay_s = self.step_s if self.overlapped else 0.0
            waiting_s = math.fsum(self._waiting_s(part, bandwidth_bps, delay_s) for part in self._fragments())
        return compute_s / max(compute_s + waiting_s, self._link_s(bandwidth_bps))

    def needed_bps(self, target: float) -> float:
        """The least bandwidth at which the utilisation reaches `target`."""
        low, high = 1e3, 1e16
        while high / low > 1 + 1e-9:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if self.utilization(middle) >= target else (middle, high)
        return high

    def _fragments(self) -> list[Sequence[int]]:
        """The layers of each synchronization; layer 0 is the first of the forward pass."""
        count = 1 if self.fragment_layers is None else max(1, self.layers // self.fragment_layers)
        return [range(first, self.layers, count) for first in range(count)]

    def _waiting_s(self, layers: Sequence[int], bandwidth_bps: float, delay_s: float) -> float:
        reduction_s = self.parameters * self.bits / self.layers / bandwidth_bps
        end_s = 0.0
        for layer in reversed(layers):
            ready_s = self.step_s / 3 + 2 * self.step_s / 3 * (self.layers - layer) / self.layers
            end_s = max(end_s, ready_s) + reduction_s
        return max(0.0, end_s - self.step_s - delay_s)

    def _link_s(self, bandwidth_bps: float) -> float:
        """The time in a round for which the link is busy, if the method overlaps the exchange with compute; else 0."""
        if not self.overlapped:
            return 0.0
        volume = _OUTER_VOLUME if self.overlapped == "outer" else _INNER_VOLUME
        return volume * self.parameters * self.bits / self.period / bandwidth_bps


def printed_gbit(needed_bps: float) -> float:
    """The last bandwidth of the grid below `needed_bps`, in Gbit/s, rounded as the papers print it."""
    below = [point for point in GRID_GBIT if point <= needed_bps / 1e9 * (1 + 1e-9)]
    return round(round(below[-1] if below else GRID_GBIT[0], 2), 1)


class DilocoUtilization(PublishedTable):
    """The bandwidth in Gbit/s for a compute utilisation of 50 to 99 percent."""

    name = "diloco-utilization"
    source = "simulated by the authors of arXiv:2501.18512 (table 4), arXiv:2502.12996 (5) and arXiv:2503.09799 (6)"
    columns = ("model", "layers", "step_s", "method", "H", "fragment_layers")
    measured = tuple(TARGETS)
    carried_along = ("table",)
    calibrated_on = (
        "the description of the simulator; two volumes of overlapped streaming on the 1B rows with H = 30 (10 cells)"
    )

    def predict(self, row: Row) -> Mapping[str, float]:
        """Gbit/s on the published grid."""
        exchange = exchange_of(row)
        return {column: printed_gbit(exchange.needed_bps(target)) for column, target in TARGETS.items()}

    def carried_rows(self) -> list[dict[str, str]]:
        """The rows that the two volumes were calibrated on."""
        rows = {"inner": ("2.4", "3.6", "4.3", "4.3", "4.3"), "outer": ("1.1", "2.0", "2.0", "2.0", "2.4")}
        return [
            {
                "model": "1B",
                "layers": "24",
                "step_s": "0.1",
                "method": f"Streaming 1-{kind}-step overlapped FP4",
                "H": "30",
                "fragment_layers": "3",
                **dict(zip(TARGETS, values, strict=True)),
            }
            for kind, values in rows.items()
        ]


def exchange_of(row: Row) -> Exchange:
    """The method and model that a row names."""
    size = re.search(r"(\d+(?:\.\d+)?)\s*([TBM])\b", row["model"], re.IGNORECASE)
    if size is None or not float(size[1]):
        raise row.problem("model", "a name with the number of parameters, such as 10B")
    billions = float(size[1]) * {"T": 1e3, "B": 1.0, "M": 1e-3}[size[2].upper()]
    method = row["method"].lower()
    is_data_parallel = re.search(r"\bdata[\s_-]*parallel", method) is not None
    if not is_data_parallel and not any(word in method for word in ("diloco", "streaming")):
        raise row.problem("method", "Data-Parallel, DiLoCo or Streaming ...")
    bits = re.search(r"\b(?:fp|bf|int)(4|8|16|32)\b", method)
    overlapped = ""
    if "overlapped" in method or "-step" in method:
        overlapped = "outer" if "outer" in method else "inner"
    fragment = row.whole("fragment_layers", empty=0, least=0)
    nearest = min(_LAYERS, key=lambda known: abs(math.log(known / billions)))
    return Exchange(
        parameters=1e9 * billions,
        layers=row.whole("layers", most=_MOST_LAYERS, empty=_LAYERS[nearest]),
        step_s=row.number("step_s"),
        period=1 if is_data_parallel else _period(row, method),
        fragment_layers=(fragment or 3) if "streaming" in method else None,
        bits=float(bits[1]) if bits else 16.0,
        overlapped=overlapped,
    )


def _period(row: Row, method: str) -> int:
    """H, of the column or of the method's name."""
    named = re.search(r"\bh\s*=?\s*(\d{1,9})\b", method)
    if row.is_empty("H") and named and int(named[1]):
        return int(named[1])
    period = row.whole("H")
    if named and int(named[1]) != period:
        raise row.problem("H", f"{named[1]}, as the method is {one_line(row['method'], 40)}")
    return period
