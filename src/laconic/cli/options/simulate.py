"""What can be typed after `laconic simulate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Predict what a training step takes under strategies, on any cluster, and say what it waits for.

    Several bandwidths or numbers of workers make a sweep: everything with everything.
    """

    strategy: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[STRATEGY ...]")] = ()
    """Presets, one-line texts in quotes, or files that end in .toml. Left out: one of each kind."""
    preset: Literal["seven"] | None = None
    """seven: the seven lossless methods of the quantitative survey, instead of strategies."""
    strategies: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """A file with one strategy per line; empty lines and what follows a # are left out."""
    workload: Annotated[str, tyro.conf.arg(metavar="NAME|FILE.json")] = "resnet50"
    """What is trained: resnet50, bert-base, gpt2, llama-7b ... or a JSON file, as profile writes."""
    compute: Annotated[str | None, tyro.conf.arg(metavar="TIME")] = None
    """How long forward and backward take together, e.g. 300ms. Left out: as long as the workload says."""
    cluster: Annotated[str, tyro.conf.arg(metavar="NAME|FILE.toml")] = "ethernet-10g"
    """ethernet-1g, ethernet-10g, cloud-100g, dgx-h100, pcie-box, two-sites ... or a file, as probe writes."""
    hosts: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Number of hosts. Left out: as many as the workers need."""
    devices: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Per host, instead of the cluster's."""
    bandwidth: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="RATE[,RATE...]")] = ()
    """Of every host's link, instead of the cluster's: 10gbit, or 1gbit,10gbit,100gbit for a sweep."""
    delay: Annotated[str | None, tyro.conf.arg(metavar="TIME")] = None
    """Of every host's link, instead of the cluster's: 25us."""
    inside: Annotated[str | None, tyro.conf.arg(metavar="RATE")] = None
    """Between the devices of one host, instead of the cluster's: 252gbit."""
    workers: Annotated[str | None, tyro.conf.arg(metavar="N|N,N|N..N[..STEP]")] = None
    """Number of workers; 4,8,16 or 4..1024 (4, 8, 16, ... 1024) or 4..64..4 for a sweep. Left out: every device."""
    fidelity: Literal["analytic", "flow"] = "analytic"
    """analytic: formulas and measured tables; flow: every message shares the links it crosses with all others."""
    slow: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="RANK=FACTOR")] = ()
    """A rank whose compute takes so many times as long, e.g. 3=2; repeat for several."""
    noise: Annotated[str, tyro.conf.arg(metavar="SHARE")] = "0"
    """Standard deviation of compute times from step to step and rank to rank, e.g. 5%."""
    interference: Annotated[str, tyro.conf.arg(metavar="SHARE")] = "0"
    """Share of its speed that compute loses while the network is busy, e.g. 20%."""
    optimizer: Annotated[str, tyro.conf.arg(metavar="TIME")] = "0"
    """How long the optimizer's step takes, e.g. 3ms; it is not overlapped with communication."""
    target: bool = False
    """Also say how many more steps it takes to reach the loss bsp has, where that was measured, and how long."""
    trace: Annotated[str | None, tyro.conf.arg(metavar="FILE.json")] = None
    """Write the simulated steps as a trace for Perfetto (ui.perfetto.dev); not for sweeps."""
    output: Annotated[str | None, tyro.conf.arg(metavar="FILE.html")] = None
    """Write an offline page with figures."""
    reference: Literal["quantitative-survey"] | None = None
    """Predict the throughput of the quantitative survey's methods for all its models and networks, instead."""
    json: bool = False
    """Print JSON instead of tables."""
