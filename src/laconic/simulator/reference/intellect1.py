"""INTELLECT-1's compute utilisation by region, from bandwidth alone.

A round is 100 inner steps and one ring all-reduce of the pseudo-gradients, 8 bits per parameter, paced by the slowest
link of the ring:

    all-reduce  = 2 (n - 1) / n * parameters * 8 bit / (bandwidth * payload share)
    utilisation = inner steps / (inner steps + all-reduce)

The report says that nodes reach each other with 0.5 to 4 Gbit/s: the upper end is taken inside the United States, the
lower end as soon as an ocean is crossed. Of a link's bits 94% are payload of TCP (1448 of 1538 bytes per frame).

Reference: Jaghouar et al. 2024, INTELLECT-1 Technical Report, arXiv:2412.01152.
"""

from __future__ import annotations

from collections.abc import Mapping

from laconic.simulator.reference.published import PublishedTable, Row

_PARAMETERS, _NODES, _BITS = 10e9, 14, 8
_PAYLOAD_SHARE = 1448 / 1538
_BANDWIDTH_BPS = {"Baseline (no comm)": None, "USA": 4e9, "USA + Europe": 0.5e9, "Global": 0.5e9}


class Intellect1(PublishedTable):
    """Percent of the time that is compute."""

    name = "intellect-1"
    source = "arXiv:2412.01152, table of performance by geographic configuration"
    columns = ("scenario", "inner_100_steps_min")
    measured = ("compute_utilization_pct",)
    carried_along = ("mfu_pct", "allreduce_s")
    calibrated_on = "nothing: the report's range of bandwidths, its number of nodes and of parameters"

    def predict(self, row: Row) -> Mapping[str, float]:
        """Percent."""
        bandwidth_bps = _BANDWIDTH_BPS[row.choice("scenario", _BANDWIDTH_BPS)]
        inner_s = 60 * row.number("inner_100_steps_min")
        exchange_s = 0.0 if bandwidth_bps is None else all_reduce_s(bandwidth_bps)
        return {"compute_utilization_pct": 100 * inner_s / (inner_s + exchange_s)}


def all_reduce_s(bandwidth_bps: float) -> float:
    """One exchange over links of that bandwidth."""
    return 2 * (_NODES - 1) / _NODES * _PARAMETERS * _BITS / (bandwidth_bps * _PAYLOAD_SHARE)
