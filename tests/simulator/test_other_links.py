"""Steps that were drawn for one bandwidth say at another exactly what steps drawn for that would say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from laconic.cluster import Cluster, Link
from laconic.simulator import Conditions, simulate
from laconic.workload import CodecCost, Layer, TensorShape, Workload

_CODEC = CodecCost(
    compressor="int8",
    encode_startup_s=2e-5,
    encode_byte_s=4e-10,
    decode_startup_s=2e-5,
    decode_byte_s=4e-10,
    source="made up",
)
WORKLOAD = Workload(
    name="blocks",
    batch=8,
    layers=tuple(
        Layer(
            name=f"{number}.block",
            forward_s=1e-3 * (number + 1),
            backward_s=2e-3,
            tensors=(TensorShape(name=f"{number}.weight", shape=(300 + 40 * number, 512)),),
        )
        for number in range(6)
    ),
    source="made up",
    codecs=(_CODEC,),
)
STRATEGIES = (
    "ddp",
    "bsp / all_reduce / int8 / fusion(bytes=1MiB)",
    "bsp / all_reduce(algorithm=double_tree) / none / fusion(bytes=1MiB)",
    "bsp / all_reduce(algorithm=auto) / none / fusion(bytes=1MiB)",
    "bsp / all_reduce(algorithm=hierarchical, compress=between_hosts) / int8 / fusion(bytes=1MiB)",
    "bsp / all_reduce / none / mg_wfbp",
    "bsp / all_reduce / none / priority(partition_bytes=256KiB)",
    "bsp / all_reduce / none / dear(bytes=1MiB)",
    "bsp / sharded / none / fusion",
    "bsp / parameter_server / none / fusion",
    "ssp / parameter_server",
    "streaming_diloco(period=8) / all_reduce / int4 + error_feedback",
    "d-psgd",
    "ad-psgd",
)


def cluster(bandwidth_bps: float, *, devices: int = 2, slow: float = 1.0) -> Cluster:
    links = (Link(bandwidth_bps=bandwidth_bps, delay_s=25e-6),) * 2
    inside = Link(bandwidth_bps=2e11, delay_s=1e-6) if devices > 1 else None
    return Cluster(links=links, devices_per_host=devices, inside=inside, speeds=(1.0, slow))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_equal_to_drawing_anew(strategy: str) -> None:
    devices = 2 if "hierarchical" in strategy else 1
    first = simulate(strategy, WORKLOAD, cluster(1e9, devices=devices))
    for rate in (1e7, 3e8, 1e10, 1e12):
        there = cluster(rate, devices=devices)
        assert (
            simulate(strategy, WORKLOAD, there, like=first).prediction == simulate(strategy, WORKLOAD, there).prediction
        )


def test_tasks_are_drawn_once_unless_something_else_differs() -> None:
    first = simulate("ddp", WORKLOAD, cluster(1e9))
    assert simulate("ddp", WORKLOAD, cluster(1e8), like=first).task_graph.labels is first.task_graph.labels
    slower = WORKLOAD.scaled(compute_s=1.0)
    others = [
        (WORKLOAD, cluster(1e8, slow=0.5), Conditions()),
        (WORKLOAD, cluster(1e8, devices=1), Conditions()),
        (slower, cluster(1e8), Conditions()),
        (WORKLOAD, cluster(1e8), Conditions(optimizer_s=0.01)),
        (WORKLOAD, cluster(1e8), Conditions(interference_ratio=0.3)),
    ]
    for workload, there, conditions in others:
        found = simulate("ddp", workload, there, conditions=conditions, like=first)
        assert found.task_graph.labels is not first.task_graph.labels
        assert found.prediction == simulate("ddp", workload, there, conditions=conditions).prediction
    coded = simulate("bsp / all_reduce / int8", WORKLOAD, cluster(1e9))
    free = replace(WORKLOAD, codecs=())
    found = simulate("bsp / all_reduce / int8", free, cluster(1e8), like=coded)
    assert found.prediction == simulate("bsp / all_reduce / int8", free, cluster(1e8)).prediction
