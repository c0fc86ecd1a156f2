"""What can be typed after `laconic profile`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Measure a model's layers, and what compressors cost on its device, into a workload for replay and simulate."""

    script: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT.py:FUNCTION")]
    """A function that returns (model, batch, loss), where loss(model, batch) is what backward() is called on."""
    output: Annotated[str | None, tyro.conf.arg(metavar="FILE.json")] = None
    """Where to keep the workload. Left out: it is only shown."""
    name: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """What to call the workload. Left out: as script and function are called."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to measure; model and batch are moved there."""
    steps: Annotated[int, tyro.conf.arg(metavar="N")] = 10
    """Steps to measure with hooks, and as many without; a few more come first and do not count."""
    compressor: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="COMPRESSOR")] = ()
    """Measure encoding and decoding of this too: int8, "topk(density=0.01) + error_feedback"; repeat for several."""
    json: bool = False
    """Print JSON instead of tables."""
