"""The options of `laconic profile`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Measure a model's layers, and the cost of compressors on its device, into a workload for replay and simulate."""

    script: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT.py:FUNCTION")]
    """A function that returns (model, batch, loss), where loss(model, batch) is what backward() is called on."""
    output: Annotated[str | None, tyro.conf.arg(metavar="FILE.json")] = None
    """File for the workload. If omitted: it is only shown."""
    name: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Name of the workload. If omitted: that of script and function."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to measure; model and batch are moved there."""
    steps: Annotated[int, tyro.conf.arg(metavar="N")] = 10
    """Steps to measure with hooks, and the same number without; a few warm-up steps come first."""
    compressor: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="COMPRESSOR")] = ()
    """Also measure encoding and decoding of this compressor: int8, "topk(density=0.01) + error_feedback"; repeat for
    several."""
    json: bool = False
    """Print JSON instead of tables."""
