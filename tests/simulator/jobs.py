"""Jobs and networks small enough to work out by hand."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.cluster import Cluster, Link
from laconic.core.exchange import Move
from laconic.simulator.network import LINK, Passage
from laconic.workload import CodecCost, Layer, TensorShape, Workload

RATE = 1e9
"""Bytes per second of the links of `hosts`."""


def job(*layers: tuple[float, float, int], codec: CodecCost | None = None) -> Workload:
    """Layers of (forward seconds, backward seconds, bytes), a tensor each where there are bytes."""
    return Workload(
        name="by hand",
        batch=10,
        source="Made up.",
        layers=tuple(
            Layer(
                name=f"l{index}",
                forward_s=forward_s,
                backward_s=backward_s,
                tensors=(TensorShape(name=f"l{index}.w", shape=(nbytes // 4,)),) if nbytes else (),
            )
            for index, (forward_s, backward_s, nbytes) in enumerate(layers)
        ),
        codecs=() if codec is None else (codec,),
    )


def hosts(count: int, delay_s: float = 0.0) -> Cluster:
    """Hosts of one device on a switch."""
    return Cluster.uniform(count, Link(bandwidth_bps=8 * RATE, delay_s=delay_s))


@dataclass(frozen=True)
class Line:
    """A network on which everything costs t(M) = startup_s + M byte_s + latency_s, of which the last can overlap."""

    byte_s: float = 1e-9
    startup_s: float = 0.0
    latency_s: float = 0.0

    def passages(self, move: Move, world_size: int, num_servers: int) -> tuple[Passage, ...]:
        if world_size == 1:
            return ()
        return (Passage(LINK, move.nbytes * self.byte_s, self.latency_s, self.startup_s),)

    def warnings(self) -> list[str]:
        return []

    def takes_s(self, nbytes: float) -> float:
        return self.startup_s + nbytes * self.byte_s + self.latency_s
