"""The seven lossless methods of a quantitative survey, predicted for all its models, networks and numbers of GPUs.

Calibrated only on the survey's measurements with one GPU and with one exchange after the whole backward pass (BSP): for
every model, network and number of GPUs

    T = batch n / throughput(BSP) - compute - offset(model)        what exchanging everything takes, in one piece

offset is the extra time, positive or negative, of a step with other GPUs in the host compared with one GPU alone. It
is the same for all networks and for both BERTs, which are one program, and is found from BSP with all-reduce as the
part that does not grow with bytes. BSP does not determine the following:

    start-up of an all-reduce    that of the network, which the survey's authors give in their program for MG-WFBP as
                                 fitted on clusters of theirs
    waiting for the GPU          The survey's programs turn Horovod's fusion, response cache and cycle time off, so each
                                 gradient is an NCCL kernel of its own, launched when the gradient is there. By then the
                                 next kernel of the backward pass runs - it had been queued before - and NCCL's kernel
                                 waits for it: on n GPUs for n/(n+1) of its length, the longest of n waits. After the
                                 backward pass there is nothing to wait for. Lengths are those of the workload's layers,
                                 whose backward pass is two kernels where there are weights, one for each product.
    interference                 30% of compute's speed is lost while GPUs exchange: the hosts are PCIe-only, and what
                                 is exchanged passes through memory that compute uses. An assumption: the round value
                                 was chosen with the published rows of ResNet-50 and BERT-Base on InfiniBand in view.

Methods run as the strategies of this library, on workloads of this library. With servers, a host's four GPUs add up
their gradients before anything crosses the network, so an exchange passes two segments in sequence: inside a host, with
the T of 4 GPUs, and between hosts, with the T of all GPUs. There are as many servers as hosts, and the load on them is
part of T.

Reference: Shi et al. 2021, A Quantitative Survey of Communication Optimizations in Distributed Deep Learning, IEEE
Network 35(3), arXiv:2005.13247; HKBU-HPML/ddl-benchmarks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from laconic.cluster import Cluster, Link
from laconic.core.exchange import Move
from laconic.core.sent_bytes import all_reduce_sent
from laconic.simulator.network import LINK, Passage
from laconic.simulator.network.contract import INSIDE
from laconic.simulator.reference.survey_figures import GPUS, MODELS, NETWORKS, THROUGHPUT
from laconic.simulator.simulation import Conditions, simulate
from laconic.workload import Workload, workload

METHODS = {
    "BSP-A2A": "bsp / all_reduce / none / sequential",
    "BSP-PS": "bsp / parameter_server(shards=1) / none / sequential",
    "WFBP-A2A": "bsp / all_reduce / none / wfbp",
    "WFBP-PS": "bsp / parameter_server(shards=1) / none / wfbp",
    "MG-WFBP": "bsp / all_reduce / none / mg_wfbp",
    "ByteScheduler-A2A": (
        "bsp / all_reduce / none / priority(partition_bytes=4000000, merge=false, credit_bytes=16000000)"
    ),
    # The survey's optimizer for servers waits for all of them before its step, so the order changes nothing.
    "ByteScheduler-PS": "bsp / parameter_server(shards=1) / none / wfbp",
}
"""The survey's methods as strategies. One shard: see above."""

_GPUS_PER_HOST = 4
_BANDWIDTH_BPS = {"10GbE": 10e9, "100GbE": 100e9, "100GbIB": 100e9}
_RING_S = {
    "10GbE": (0.042e-3, 0.523e-3, 0.908e-3, 1.348e-3),
    "100GbIB": (0.042e-3, 0.098e-3, 0.236e-3, 0.406e-3),
}
"""Start-up of an all-reduce among each of GPUS; TCP/IP over InfiniBand is taken half-way between the two."""
_BYTEPS_GROUP = 4
"""NCCL calls that BytePS launches together, unless told otherwise (BYTEPS_NCCL_GROUP_SIZE)."""
_MEMORY_BYTES_PER_S = 616e9
_OPTIMIZER_BYTES = {"ResNet-50": 28, "BERT-Base": 76, "BERT-Large": 76}
"""Bytes that the optimizer's kernels read and write per parameter: SGD with momentum; AdamW as separate kernels."""


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Assumptions that BSP does not determine."""

    waits_for_kernels: bool = True
    """Whether an exchange waits for the compute kernel that runs when it begins."""
    interference_ratio: float = 0.3
    """Share of its speed that compute loses while GPUs exchange."""


def table(assumptions: Assumptions | None = None) -> list[dict[str, object]]:
    """One entry per cell of the survey: model, network, method, gpus and predicted throughput in samples per second."""
    return [
        {"model": model, "network": network, "method": method, "gpus": gpus, "throughput": found}
        for model in MODELS
        for network in NETWORKS
        for method in METHODS
        for gpus in GPUS
        for found in [throughput(model, network, method, gpus, assumptions)]
    ]


def throughput(model: str, network: str, method: str, gpus: int, assumptions: Assumptions | None = None) -> float:
    """Predicted samples per second of all GPUs together."""
    assumptions = assumptions or Assumptions()
    job = workload(MODELS[model])
    optimizer_s = _OPTIMIZER_BYTES[model] * job.num_parameters / _MEMORY_BYTES_PER_S
    found = simulate(
        METHODS[method],
        job.scaled(compute_s=job.compute_s + offsets()[model] - optimizer_s),
        _cluster(network, gpus),
        network=_network(model, network, method, gpus, _waits_s(model, method, gpus, assumptions)),
        conditions=Conditions(interference_ratio=assumptions.interference_ratio, optimizer_s=optimizer_s),
    ).prediction
    return gpus * job.batch / found.step_s


class Segment(NamedTuple):
    """A segment of the network and its cost: t = startup_s + bytes x byte_s."""

    where: str
    startup_s: float
    byte_s: float
    latency_s: float = 0.0
    """Its latency, during which other exchanges may be in flight."""
    launch_s: float = 0.0
    """The delay before an exchange begins while GPUs compute."""
    disturbs: bool = True
    """Whether compute is slower during an exchange."""

    def passage(self, nbytes: int) -> Passage:
        """The cost of this many bytes."""
        moving_s = nbytes * self.byte_s
        if self.disturbs:
            return Passage(self.where, moving_s, self.latency_s, self.startup_s, launch_s=self.launch_s)
        return Passage(self.where, 0.0, self.latency_s, self.startup_s + moving_s)


@dataclass(frozen=True)
class CalibratedNetwork:
    """Segments that exchanges pass one after the other, taking turns on each."""

    segments: tuple[Segment, ...]

    def passages(self, move: Move, world_size: int, num_servers: int) -> tuple[Passage, ...]:
        """An all-reduce, or the transfer to the servers and back."""
        return tuple(segment.passage(move.nbytes) for segment in self.segments)

    def warnings(self) -> list[str]:
        return []


def _waits_s(model: str, method: str, gpus: int, assumptions: Assumptions) -> float:
    """The wait for busy GPUs: of one host if GPUs add up only inside their host, else of all hosts."""
    if not assumptions.waits_for_kernels:
        return 0.0
    return launch_s(model, GPUS[0] if method.endswith("-PS") else gpus)


def launch_s(model: str, gpus: int) -> float:
    """The time that an exchange waits for busy GPUs: for the next kernel, averaged over all gradients."""
    layers = _job(model).layers[::-1]
    kernels_s = [layer.backward_s / (2 if layer.tensors else 1) for layer in layers]
    waits_s = [next_s for layer, next_s in zip(layers, [*kernels_s[1:], 0.0], strict=True) for _ in layer.tensors]
    return gpus / (gpus + 1) * sum(waits_s) / len(waits_s)


def _network(model: str, network: str, method: str, gpus: int, launch_s: float) -> CalibratedNetwork:
    def byte_s(of: str, among: int) -> float:
        return exchange_s(model, network, of, among) / _job(model).gradient_bytes

    if method.startswith("BSP"):
        # T includes start-up and all other costs of the one exchange.
        return CalibratedNetwork((Segment(LINK, 0.0, byte_s(method, gpus)),))
    if method.endswith("-PS"):
        inside = Segment(INSIDE, 0.0, byte_s("BSP-PS", GPUS[0]), launch_s=launch_s / _BYTEPS_GROUP)
        # Between the memories of hosts and servers, where no GPU takes part.
        between = Segment(LINK, 0.0, byte_s("BSP-PS", gpus), disturbs=False)
        return CalibratedNetwork((inside,) if gpus == GPUS[0] else (inside, between))
    ring_s = _ring_s(network, gpus)
    if method == "ByteScheduler-A2A":
        # Its credit allows several in flight, which hide each other's latency.
        return CalibratedNetwork((Segment(LINK, 0.0, byte_s("BSP-A2A", gpus), ring_s, launch_s),))
    return CalibratedNetwork((Segment(LINK, ring_s, byte_s("BSP-A2A", gpus), launch_s=launch_s),))


def _ring_s(network: str, gpus: int) -> float:
    place = GPUS.index(gpus)
    if network in _RING_S:
        return _RING_S[network][place]
    return sum(times[place] for times in _RING_S.values()) / len(_RING_S)


def _cluster(network: str, gpus: int) -> Cluster:
    links = (Link(bandwidth_bps=_BANDWIDTH_BPS[network]),) * (gpus // _GPUS_PER_HOST)
    return Cluster(links=links, devices_per_host=_GPUS_PER_HOST, inside=Link(bandwidth_bps=64e9))


# -- calibration -------------------------------------------------------------------------------------------------


@cache
def _job(model: str) -> Workload:
    return workload(MODELS[model])


def _measured_s(model: str, network: str, method: str, gpus: int) -> float | None:
    """The time of a BSP step beyond the compute time of one GPU."""
    found = THROUGHPUT[model, network, method][GPUS.index(gpus)]
    return None if found is None else gpus * _job(model).batch / found - _job(model).compute_s


@cache
def offsets() -> dict[str, float]:
    """For each model, the time of a step beyond one GPU's compute and the exchange, by least squares.

    measured(model, network, n) = offset(program) + bytes(model, n) x seconds per byte(network, n)

    Without a program of two sizes, an offset proportional to bytes could not be distinguished from time per byte.
    """
    programs, places = ["ResNet", "BERT"], [(network, gpus) for network in NETWORKS for gpus in GPUS]
    rows, values = [], []
    for model in MODELS:
        program = programs.index(model.partition("-")[0])
        for place, (network, gpus) in enumerate(places):
            measured_s = _measured_s(model, network, "BSP-A2A", gpus)
            assert measured_s is not None, "BSP with all-reduce was measured everywhere"
            row = np.zeros(len(programs) + len(places))
            row[program] = 1.0
            row[len(programs) + place] = all_reduce_sent(_job(model).gradient_bytes, gpus) / 1e9
            # Errors are relative to the whole step, as the survey's own deviations are.
            step_s = measured_s + _job(model).compute_s
            rows.append(row / step_s)
            values.append(measured_s / step_s)
    solution, *_ = np.linalg.lstsq(np.array(rows), np.array(values), rcond=None)
    return {model: float(solution[programs.index(model.partition("-")[0])]) for model in MODELS}


def exchange_s(model: str, network: str, method: str, gpus: int) -> float:
    """T: the time of one exchange of all gradients; where networks were mixed up, BERT-Base's time scaled by bytes."""
    measured_s = _measured_s(model, network, method, gpus)
    if measured_s is not None:
        return measured_s - offsets()[model]
    known_s = exchange_s("BERT-Base", network, method, gpus)
    return known_s * _job(model).gradient_bytes / _job("BERT-Base").gradient_bytes
