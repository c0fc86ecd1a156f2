"""laconic: PyTorch training where the network is the bottleneck.

with laconic.attach(model, optimizer, "bsp / all_reduce / bf16 / fusion(25MiB)"):
    for batch in data:
        loss(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
"""

from laconic.core.event import Event, EventList, EventLog
from laconic.core.in_process import InProcessCluster
from laconic.core.tensor import TensorSpec
from laconic.core.transport import Transport
from laconic.errors import LaconicError
from laconic.runtime import Session, attach
from laconic.strategy import Strategy

__version__ = "0.1.0"

__all__ = [
    "Event",
    "EventList",
    "EventLog",
    "InProcessCluster",
    "LaconicError",
    "Session",
    "Strategy",
    "TensorSpec",
    "Transport",
    "__version__",
    "attach",
]
