"""Replicas of inference services on the GPUs of a cluster, round after round.

Services come before jobs: in each round they take the GPUs that their latency targets need, and jobs share the rest. If
there are too few GPUs, the services that came first get theirs. A replica that is added takes the time of a start
before it answers; one that is no longer needed is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from laconic.jobs.pool import GpuPool, Placement
from laconic.jobs.service import Service


@dataclass(frozen=True, kw_only=True)
class Served:
    """The outcome of one service."""

    service: Service
    requests: float
    late_share: float
    """Share of its requests that were late."""
    gpu_s: float
    most_replicas: int


@dataclass(eq=False)
class _Record:
    requests: float = 0.0
    late: float = 0.0
    gpu_s: float = 0.0
    most: int = 0


@dataclass(eq=False)
class Serving:
    """All services of a run."""

    services: Sequence[Service]
    start_s: float
    replicas: dict[int, list[Placement]] = field(default_factory=dict)
    _records: dict[int, _Record] = field(default_factory=dict)
    _wanted: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.services = sorted(self.services, key=lambda service: service.arrival_s)
        self._records = {number: _Record() for number in range(len(self.services))}

    @property
    def last_end_s(self) -> float:
        """When the last service leaves."""
        return max((service.end_s for service in self.services), default=0.0)

    def plan(self, num_gpus: int, begin_s: float, end_s: float) -> int:
        """Decide on the replicas of a round; returns how many of the GPUs are left for jobs."""
        self._wanted = {}
        for number, service in enumerate(self.services):
            if service.arrival_s < end_s and service.end_s > begin_s:
                wanted = min(service.replicas(service.load(begin_s, end_s)), num_gpus // service.gpus)
                self._wanted[number] = wanted
                num_gpus -= wanted * service.gpus
        return num_gpus

    def shrink(self, pool: GpuPool) -> None:
        """Drop replicas that the round does not need."""
        for number, placements in self.replicas.items():
            while len(placements) > self._wanted.get(number, 0):
                pool.give_back(placements.pop())

    def grow(self, pool: GpuPool, begin_s: float, end_s: float) -> None:
        """Add replicas, and count the requests of the round."""
        for number, wanted in self._wanted.items():
            service, placements = self.services[number], self.replicas.setdefault(number, [])
            before = len(placements)
            while len(placements) < wanted:
                placements.append(pool.take(service.gpus, "pack"))
            ready_s = min(end_s, begin_s + self.start_s) if wanted > before else begin_s
            record = self._records[number]
            for count, first_s, last_s in ((before, begin_s, ready_s), (wanted, ready_s, end_s)):
                here_s = min(last_s, service.end_s) - max(first_s, service.arrival_s)
                if here_s > 0:
                    rate = service.load(first_s, last_s)
                    record.requests += rate * here_s
                    record.late += rate * here_s * service.late_share(count, rate)
            record.gpu_s += wanted * service.gpus * (end_s - begin_s)
            record.most = max(record.most, wanted)

    def outcome(self) -> list[Served]:
        """The outcome of each service, in order of arrival."""
        return [
            Served(
                service=service,
                requests=record.requests,
                late_share=record.late / record.requests if record.requests else 0.0,
                gpu_s=record.gpu_s,
                most_replicas=record.most,
            )
            for service, record in zip(self.services, self._records.values(), strict=True)
        ]
