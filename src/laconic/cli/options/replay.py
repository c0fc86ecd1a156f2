"""What can be typed after `laconic replay`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Sleep each layer's compute time while its gradients, which are real, cross real links; torch DDP beside.

    Schedules are measured cleanly this way even on few cores, for models no machine at hand could train.
    """

    workload: Annotated[str, tyro.conf.arg(metavar="NAME|FILE.json")] = "resnet50"
    """resnet50, bert-base, gpt2, or a JSON file (docs/workloads.md)."""
    strategy: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[STRATEGY ...]")] = ()
    """Presets, or one-line texts in quotes. Left out: one of each kind."""
    preset: Literal["seven"] | None = None
    """seven: the seven lossless methods of the quantitative survey, instead of strategies."""
    strategies: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """A file with one strategy per line; empty lines and what follows a # are left out."""
    hosts: int = 4
    """Number of virtual hosts, one process each."""
    bandwidth: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="RATE")] = ()
    """Of every host's link: 100mbit, 1gbit; repeat for several. Left out: 1gbit."""
    cluster: Annotated[str | None, tyro.conf.arg(metavar="FILE.toml")] = None
    """Hosts, links and racks from a file, instead of --hosts and --bandwidth."""
    links: Literal["auto", "shaped", "paced"] = "auto"
    """shaped: real links of virtual hosts; paced: held back in software; auto: shaped where this machine allows it."""
    compute: Annotated[str | None, tyro.conf.arg(metavar="TIME")] = None
    """How long forward and backward take together, e.g. 500ms. Left out: as long as the workload says."""
    steps: Annotated[int, tyro.conf.arg(metavar="N")] = 10
    """Steps under each strategy, in turns."""
    timeout: Annotated[str, tyro.conf.arg(metavar="TIME")] = "30min"
    """How long the replay on one link may take."""
    config: Annotated[str | None, tyro.conf.arg(metavar="FILE.toml")] = None
    """Repeat a run from its config.toml, instead of the options above."""
    output: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where to keep the run. Left out: runs/TIME-replay."""
    json: bool = False
    """Print JSON instead of tables."""
