"""NCCL and oneCCL on ten systems, one node: 8 GPUs predicted from 2 and 4, other message sizes from stored ones.

The package carries every second size among 2 and 4 GPUs (cluster/collective_costs/systems.json); all else is predicted
by cluster/collective_costs/costs.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from laconic.cluster.collective_costs import CollectiveCosts, system, system_names
from laconic.simulator.reference.published import PublishedTable, Row

_OPERATIONS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}


class Nccl(PublishedTable):
    """nccl-tests' time of one operation."""

    name = "nccl"
    source = (
        "NVIDIA aiconfigurator, systems/data/<system>/comm, nccl_perf and oneccl_perf "
        "(github.com/ai-dynamo/aiconfigurator)"
    )
    columns = ("system", "library", "op", "gpus", "bytes")
    measured = ("latency_ms",)
    calibrated_on = (
        "2 and 4 GPUs at every second size (powers of four from 512 B); the ramp of in-switch sums on one row of "
        "Vidur's DGX H100, their rate on NCCL's own cost model"
    )

    def predict(self, row: Row) -> Mapping[str, float]:
        """Milliseconds."""
        costs = CollectiveCosts(row.choice("system", system_names()))
        operation = _OPERATIONS[row.choice("op", _OPERATIONS)]
        gpus, nbytes = row.whole("gpus"), row.whole("bytes")
        library = row["library"].lower()
        if not library.startswith(("nccl", "oneccl")):
            row.assume("library", "like nccl")
        if library.startswith("oneccl") and operation == "all_gather":
            nbytes *= gpus  # that benchmark counts the bytes of one rank
        return {"latency_ms": 1e3 * costs.seconds(operation, nbytes, gpus)}

    def carried_rows(self) -> list[dict[str, str]]:
        """The largest size among 4 GPUs of every system, from which the plateau is read off."""
        return [
            {
                "system": name,
                "library": "oneccl" if name == "b60" else "nccl",
                "op": "all_reduce",
                "gpus": "4",
                "bytes": f"{curve.sizes[-1]:.0f}",
                "latency_ms": f"{1e3 * curve.seconds[-1]:.6g}",
            }
            for name in system_names()
            for curve in [system(name).curves["all_reduce"][4]]
        ]
