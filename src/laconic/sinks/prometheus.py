"""Numbers of the last step for Prometheus.

    laconic_steps_total, laconic_sent_bytes_total     counters
    laconic_step_seconds, laconic_wait_seconds, ...   gauges of the last complete step

Each metric has the label `rank`.
"""

from __future__ import annotations

from typing import Any

from laconic.errors import LaconicError
from laconic.sinks.step_values import StepValues
from laconic.sinks.tracker import TrackerSink, tracker_package


class PrometheusSink(TrackerSink):
    """Sets metrics that a Prometheus server scrapes.

    port:     serve them on this port until the sink is closed; default: the script serves them itself.
    address:  where to listen. Anyone who can reach it can read the metrics; 127.0.0.1 is reachable from this host only.
    registry: a prometheus_client.CollectorRegistry; default: one of the sink's own with a port, else the global one.
    """

    def __init__(self, *, port: int | None = None, address: str = "127.0.0.1", registry: Any = None) -> None:
        self._client = client = tracker_package("prometheus_client", package="prometheus_client", sink="PrometheusSink")
        if registry is None:
            registry = client.REGISTRY if port is None else client.CollectorRegistry()
        self._registry = registry
        self._metrics: dict[str, Any] = {
            name: client.Counter(f"laconic_{name}", what, ["rank"], registry=registry)
            for name, what in (("steps", "Optimizer steps"), ("sent_bytes", "Payload bytes sent"))
        }
        self._server: Any = None
        if port is not None:
            try:
                self._server, _ = client.start_http_server(port, addr=address, registry=registry)
            except OSError as exc:
                raise LaconicError(f"PrometheusSink: cannot listen on {address}:{port}: {exc.strerror}.") from exc
        super().__init__()

    def send(self, values: StepValues) -> None:
        """Set every metric."""
        rank = str(values.rank)
        self._metrics["steps"].labels(rank).inc()
        for name, value in values.values.items():
            if name == "sent_bytes":
                self._metrics[name].labels(rank).inc(value)
            else:
                self._gauge(name).labels(rank).set(value)

    def finish(self) -> None:
        """Stop serving, and unregister the metrics."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        for metric in self._metrics.values():
            self._registry.unregister(metric)

    def _gauge(self, name: str) -> Any:
        if name not in self._metrics:
            title = f"laconic_{name[:-2]}_seconds" if name.endswith("_s") else f"laconic_{name}"
            what = f"{name} of the last complete step"
            self._metrics[name] = self._client.Gauge(title, what, ["rank"], registry=self._registry)
        return self._metrics[name]
