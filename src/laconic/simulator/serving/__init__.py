"""Serving a transformer: time to first token and time per output token, and the network's share of both."""

from laconic.simulator.serving.deployment import Deployment, Precision
from laconic.simulator.serving.devices import DEVICES, ServingDevice, serving_device
from laconic.simulator.serving.forward import ForwardPass, PassTime
from laconic.simulator.serving.frameworks import FRAMEWORKS, Framework
from laconic.simulator.serving.latency import Served, aggregated, disaggregated
from laconic.simulator.serving.load import Load

__all__ = [
    "DEVICES",
    "FRAMEWORKS",
    "Deployment",
    "ForwardPass",
    "Framework",
    "Load",
    "PassTime",
    "Precision",
    "Served",
    "ServingDevice",
    "aggregated",
    "disaggregated",
    "serving_device",
]
