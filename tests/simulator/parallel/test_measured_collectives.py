"""Measured collectives inside known nodes; formulas elsewhere; what is extrapolated is said."""

from __future__ import annotations

import pytest

from laconic.cluster import cluster
from laconic.cluster.collective_costs import CollectiveCosts
from laconic.simulator.parallel.accelerator import H100
from laconic.simulator.parallel.extrapolations import extrapolations
from laconic.simulator.parallel.fabric import Members, Operation, fabric_of
from laconic.simulator.parallel.plan import Plan
from laconic.simulator.parallel.software import MEGATRON_CORE
from laconic.simulator.parallel.system import Job, System
from laconic.workload.transformer_presets import MODELS

NODES = cluster("dgx-h100", hosts=2)
JOB = Job(model=MODELS["llama3-8b"], sequence=4096, global_batch=16)


def _system(name: str, hosts: int) -> System:
    return System(accelerator=H100, fabric=fabric_of(cluster(name, hosts=hosts), H100.name), software=MEGATRON_CORE)


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_inside_a_node_the_table_is_taken_and_between_nodes_the_formula(operation: Operation) -> None:
    measured, formula = fabric_of(NODES, H100.name), fabric_of(NODES)
    assert (measured.measured, formula.measured) == ("h100_sxm", "")
    table = CollectiveCosts("h100_sxm")
    for nbytes in (1e5, 3e7, 1e9):
        assert measured.seconds(operation, nbytes, Members(4, 4)) == table.seconds(operation, nbytes, 4)
        across = Members(16, 8)
        assert measured.seconds(operation, nbytes, across) == formula.seconds(operation, nbytes, across)


def test_nodes_that_were_not_measured_keep_the_formulas() -> None:
    assert fabric_of(cluster("pcie-box"), H100.name).measured == ""
    assert fabric_of(NODES, "A100 80 GB").measured == ""


def test_extrapolation_is_said() -> None:
    system = _system("dgx-h100", 2)
    wide = extrapolations(JOB, Plan(dp=2, tp=8, sequence_parallel=True), system)
    assert any("among 8 GPUs is extrapolated" in warning for warning in wide)
    assert extrapolations(JOB, Plan(dp=8, tp=2, sequence_parallel=True), system) == []
    assert extrapolations(JOB, Plan(dp=2, tp=8, sequence_parallel=True), _system("pcie-box", 2)) == []
