"""The options of `laconic replay`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Replay a workload under each strategy and torch DDP: sleeps stand in for compute, gradients cross real links.

    This measures schedules cleanly even on few cores, for models that this machine could not train.
    """

    workload: Annotated[str, tyro.conf.arg(metavar="NAME|FILE.json")] = "resnet50"
    """resnet50, bert-base, gpt2, or a JSON file (docs/workloads.md)."""
    strategy: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[STRATEGY ...]")] = ()
    """Presets, or one-line texts in quotes. If omitted: one of each kind."""
    preset: Literal["seven"] | None = None
    """seven: the seven lossless methods of the quantitative survey, instead of strategies."""
    strategies: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """A file with one strategy per line; empty lines and comments after a # are skipped."""
    hosts: int = 4
    """Number of virtual hosts, one process each."""
    bandwidth: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="RATE")] = ()
    """Bandwidth of every host's link: 100mbit, 1gbit; repeat for several. If omitted: 1gbit."""
    cluster: Annotated[str | None, tyro.conf.arg(metavar="FILE.toml")] = None
    """Hosts, links and racks from a file, instead of --hosts and --bandwidth."""
    links: Literal["auto", "shaped", "paced"] = "auto"
    """shaped: real links of virtual hosts; paced: limited in software; auto: shaped where this machine allows it."""
    compute: Annotated[str | None, tyro.conf.arg(metavar="TIME")] = None
    """The time of forward and backward together, e.g. 500ms. If omitted: that of the workload."""
    steps: Annotated[int, tyro.conf.arg(metavar="N")] = 10
    """Steps under each strategy; the strategies take turns."""
    timeout: Annotated[str, tyro.conf.arg(metavar="TIME")] = "30min"
    """How long the replay on one link may take."""
    config: Annotated[str | None, tyro.conf.arg(metavar="FILE.toml")] = None
    """Repeat a run from its config.toml, instead of the options above."""
    output: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder of the run. If omitted: runs/TIME-replay."""
    json: bool = False
    """Print JSON instead of tables."""
