"""laconic: PyTorch training where the network is the bottleneck.

with laconic.attach(model, optimizer, "bsp / all_reduce / bf16 / fusion(25MiB)"):
    for batch in data:
        loss(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING

from laconic.core.event import Event, EventList, EventLog, EventTee
from laconic.errors import LaconicError

__version__ = "0.1.0"

if TYPE_CHECKING:
    from laconic.core.in_process import InProcessCluster
    from laconic.core.tensor import TensorSpec
    from laconic.core.transport import Transport
    from laconic.runtime import Session, attach
    from laconic.strategy import Strategy
else:
    _HOMES = {
        "InProcessCluster": "laconic.core.in_process",
        "TensorSpec": "laconic.core.tensor",
        "Transport": "laconic.core.transport",
        "Session": "laconic.runtime",
        "attach": "laconic.runtime",
        "Strategy": "laconic.strategy",
    }
    """Where the names live that need torch."""

    def __getattr__(name: str) -> object:
        """Import a public name, or a subpackage such as `laconic.runtime`, when it is first used.

        torch takes seconds to import, and the command line imports this package also to print a help text.
        """
        if name in _HOMES:
            value = getattr(importlib.import_module(_HOMES[name]), name)
        elif not name.startswith("_") and importlib.util.find_spec(f"laconic.{name}") is not None:
            value = importlib.import_module(f"laconic.{name}")
        else:
            raise AttributeError(f"module 'laconic' has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "Event",
    "EventList",
    "EventLog",
    "EventTee",
    "InProcessCluster",
    "LaconicError",
    "Session",
    "Strategy",
    "TensorSpec",
    "Transport",
    "__version__",
    "attach",
]
