"""vTrain's measurements with Megatron-DeepSpeed on one node of up to 8 A100: 1,440 configurations of small models.

Small models wait for the host, which launches their kernels, as often as for the GPU. Six numbers were fitted to every
tenth row: the shares of the peak and of the memory's bandwidth that kernels reach, the time that the host takes to
launch a layer within one socket and across two, how sharply the slower of host and GPU decides, and a constant per
step.

Reference: Bang et al. 2024, vTrain, MICRO, arXiv:2312.12391; VIA-Research/vTrain, data/ground_truth_single.csv.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from laconic.simulator.parallel.accelerator import A100
from laconic.simulator.parallel.fabric import a100_nodes
from laconic.simulator.parallel.system import System
from laconic.simulator.reference.published import PublishedTable, Row
from laconic.simulator.reference.vtrain import MEGATRON_DEEPSPEED, iteration_ms

_SYSTEM = System(
    accelerator=replace(A100, matmul_share=0.88, memory_share=0.65),
    fabric=a100_nodes(12.5e9),
    software=MEGATRON_DEEPSPEED,
)


class VTrainSingle(PublishedTable):
    """Iteration times on one node."""

    name = "vtrain-single"
    source = "Bang et al. 2024, vTrain (MICRO), data/ground_truth_single.csv: Megatron-DeepSpeed on 2 to 8 A100."
    columns = ("gpus", "global_batch", "micro_batch", "hidden", "heads", "layers", "seq", "tp", "dp", "pp")
    measured = ("iteration_ms",)
    calibrated_on = "every tenth row, from the first (144 of 1,440): six numbers."

    def predict(self, row: Row) -> Mapping[str, float]:
        return {"iteration_ms": iteration_ms(row, _SYSTEM)}

    def carried_rows(self) -> list[dict[str, str]]:
        """The first three of the rows that were used for the fit."""
        rows = (
            ("2", "16", "8", "1024", "16", "24", "1024", "1", "1", "2", "372.160408"),
            ("4", "16", "2", "2048", "16", "24", "1024", "1", "4", "1", "304.165703"),
            ("8", "64", "1", "1024", "16", "12", "1024", "2", "4", "1", "700.42027"),
        )
        return [dict(zip((*self.columns, *self.measured), cells, strict=True)) for cells in rows]
