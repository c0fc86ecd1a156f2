"""DeepEP's normal kernels: dispatch and combine of a mixture of experts on 4 and 8 nodes, predicted from 1 and 2."""

from __future__ import annotations

from collections.abc import Mapping

from laconic.cluster.collective_costs import ExpertAllToAll, Routing
from laconic.simulator.reference.published import PublishedTable, Row

_GPUS_PER_NODE = 8


class DeepEp(PublishedTable):
    """Time of one dispatch and one combine, without the notifications before them."""

    name = "deepep"
    source = "NVIDIA aiconfigurator, wideep_deepep_normal_perf (github.com/ai-dynamo/aiconfigurator)"
    columns = ("system", "version", "nodes", "hidden", "tokens", "topk", "experts", "dispatch_sms", "combine_sms")
    measured = ("dispatch_us", "combine_us")
    carried_along = ("dispatch_notify_us", "combine_notify_us")
    calibrated_on = (
        "the plateaus (131,072 tokens) of 1 and 2 nodes with 20 SMs and of dispatch on 2 nodes with 24, and the "
        "start-up and ramp of the rows with 20 SMs; H100 and H200 are alike"
    )

    def predict(self, row: Row) -> Mapping[str, float]:
        """Microseconds."""
        row.choice("system", ("h100_sxm", "h200_sxm"))
        nodes = row.whole("nodes")
        routing = Routing(
            gpus=nodes * _GPUS_PER_NODE,
            nodes=nodes,
            experts=row.whole("experts"),
            experts_per_token=row.whole("topk"),
        )
        hidden, tokens = row.whole("hidden"), row.whole("tokens")
        dispatch = ExpertAllToAll(routing=routing, hidden=hidden, sms=row.whole("dispatch_sms"))
        combine = ExpertAllToAll(routing=routing, hidden=hidden, sms=row.whole("combine_sms"))
        return {
            "dispatch_us": 1e6 * dispatch.seconds("dispatch", tokens),
            "combine_us": 1e6 * combine.seconds("combine", tokens),
        }

    def carried_rows(self) -> list[dict[str, str]]:
        """The plateaus that the constants were taken from."""
        plateaus = {(1, 20): ("15631.93", "27215.11"), (2, 20): ("24976.0", "58308.0"), (2, 24): ("21931.0", "48700.0")}
        return [
            {
                "system": "h100_sxm",
                "version": "0.5.6.post2",
                "nodes": str(nodes),
                "hidden": "7168",
                "tokens": "131072",
                "topk": "8",
                "experts": "256",
                "dispatch_sms": str(sms),
                "combine_sms": str(sms),
                "dispatch_us": dispatch_us,
                "combine_us": combine_us,
            }
            for (nodes, sms), (dispatch_us, combine_us) in plateaus.items()
        ]
