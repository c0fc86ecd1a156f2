"""SwitchML's sums in a switch compared with NCCL's, 4 to 16 workers on 100 Gbit/s.

The cost of both on one switch is computed by the simulator's own formulas, with the share of the line rate that each
was measured to reach among 4 workers: sums in the switch 2830e6 and NCCL 1380e6 32-bit values a second. That share is
taken to be the same among more workers, so the prediction is how the ratio grows with the number of workers.

Reference: Sapio et al. 2021 (SwitchML), NSDI; the benchmark in the README of its repository.
"""

from __future__ import annotations

from collections.abc import Mapping

from laconic.cluster import Cluster, Link
from laconic.core.exchange import Move
from laconic.simulator.network.analytic import AnalyticNetwork
from laconic.simulator.network.contract import seconds
from laconic.simulator.reference.published import PublishedTable, Row

_LINE_BPS = 100e9
_SUMMED_BYTES = 100_000_000
"""Large enough that start-up does not count."""
_SLOTS = 512
_MEASURED_AT_4 = {"switchml_rdma": 2830.0, "nccl_rdma": 1380.0}
"""Of the benchmark, in 1e6 values a second."""


class SwitchMl(PublishedTable):
    """Aggregated values per second, and their ratio to NCCL's."""

    name = "switchml"
    source = (
        "SwitchML's benchmark (github.com/p4lang/p4app-switchML, README): bars read off the figure, +-20e6 values/s."
    )
    columns = ("workers",)
    measured = ("ratio", "switchml_rdma", "nccl_rdma")
    calibrated_on = "the row of 4 workers: the share of 100 Gbit/s that each of the two reaches."

    def predict(self, row: Row) -> Mapping[str, float]:
        """Millions of 32-bit values per second, and their ratio."""
        workers = row.whole("workers", least=2)
        found = {
            name: _MEASURED_AT_4[name] * _rate(move, workers) / _rate(move, 4)
            for name, move in (
                ("switchml_rdma", Move("aggregate", (_SUMMED_BYTES,), slots=_SLOTS)),
                ("nccl_rdma", Move("sum", (_SUMMED_BYTES,), "ring")),
            )
        }
        return {"ratio": found["switchml_rdma"] / found["nccl_rdma"], **found}

    def carried_rows(self) -> list[dict[str, str]]:
        """The row of 4 workers."""
        ratio = _MEASURED_AT_4["switchml_rdma"] / _MEASURED_AT_4["nccl_rdma"]
        return [
            {"workers": "4", "ratio": f"{ratio:.3g}", **{name: f"{rate:.0f}" for name, rate in _MEASURED_AT_4.items()}}
        ]


def _rate(move: Move, workers: int) -> float:
    """Values per second among `workers` on one switch, at the full line rate."""
    network = AnalyticNetwork(Cluster.uniform(workers, Link(bandwidth_bps=_LINE_BPS)))
    return move.nbytes / 4 / seconds(network, move, workers)
