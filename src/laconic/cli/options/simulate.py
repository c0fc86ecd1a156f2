"""The options of `laconic simulate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Predict the time of a training step under strategies, on any cluster, and what it waits for.

    Several bandwidths or numbers of workers make a sweep over all combinations.
    """

    strategy: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[STRATEGY ...]")] = ()
    """Presets, one-line texts in quotes, or files that end in .toml. If omitted: one of each kind."""
    preset: Literal["seven"] | None = None
    """seven: the seven lossless methods of the quantitative survey, instead of strategies."""
    strategies: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """A file with one strategy per line; empty lines and comments after a # are skipped."""
    workload: Annotated[str, tyro.conf.arg(metavar="NAME|FILE.json")] = "resnet50"
    """The model: resnet50, bert-base, gpt2, llama-7b ... or a JSON file (laconic profile writes one)."""
    compute: Annotated[str | None, tyro.conf.arg(metavar="TIME")] = None
    """The time of forward and backward together, e.g. 300ms. If omitted: that of the workload."""
    cluster: Annotated[str, tyro.conf.arg(metavar="NAME|FILE.toml")] = "ethernet-10g"
    """ethernet-1g, ethernet-10g, cloud-100g, dgx-h100, pcie-box, two-sites ... or a file (laconic probe writes one)."""
    hosts: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Number of hosts. If omitted: as many as the workers need."""
    devices: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Devices per host, instead of the cluster's."""
    bandwidth: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="RATE[,RATE...]")] = ()
    """Bandwidth of every host's link, instead of the cluster's: 10gbit, or 1gbit,10gbit,100gbit for a sweep."""
    delay: Annotated[str | None, tyro.conf.arg(metavar="TIME")] = None
    """Delay of every host's link, instead of the cluster's: 25us."""
    inside: Annotated[str | None, tyro.conf.arg(metavar="RATE")] = None
    """Bandwidth between the devices of one host, instead of the cluster's: 252gbit."""
    workers: Annotated[str | None, tyro.conf.arg(metavar="N|N,N|N..N[..STEP]")] = None
    """Number of workers; 4,8,16 or 4..1024 (4, 8, 16, ... 1024) or 4..64..4 for a sweep. If omitted: every device."""
    fidelity: Literal["analytic", "flow"] = "analytic"
    """analytic: formulas and measured tables; flow: every message shares the links it crosses with all others."""
    slow: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="RANK=FACTOR")] = ()
    """A slow rank and the factor on its compute time, e.g. 3=2; repeat for several."""
    noise: Annotated[str, tyro.conf.arg(metavar="SHARE")] = "0"
    """Standard deviation of compute times from step to step and rank to rank, e.g. 5%."""
    interference: Annotated[str, tyro.conf.arg(metavar="SHARE")] = "0"
    """Share of its speed that compute loses while the network is busy, e.g. 20%."""
    optimizer: Annotated[str, tyro.conf.arg(metavar="TIME")] = "0"
    """The time of the optimizer's step, e.g. 3ms; it is not overlapped with communication."""
    target: bool = False
    """Also show the steps and the time to reach the loss of bsp, where they were measured."""
    trace: Annotated[str | None, tyro.conf.arg(metavar="FILE.json")] = None
    """Write the simulated steps as a trace for Perfetto (ui.perfetto.dev); not for sweeps."""
    output: Annotated[str | None, tyro.conf.arg(metavar="FILE.html")] = None
    """Write an offline page with figures."""
    serve: Annotated[str | None, tyro.conf.arg(metavar="'KEY=VALUE ...'")] = None
    """Latency of serving a large model instead: 'model=llama3-70b device=h100_sxm tp=1,2,4,8' (docs/serving.md)."""
    reference: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Predict a published table of measurements instead: quantitative-survey, vtrain, ... (docs/large-models.md)."""
    rows: Annotated[str | None, tyro.conf.arg(metavar="FILE.csv")] = None
    """Rows to predict, with the columns of the table of --reference. If omitted: those used for calibration."""
    calibrate: Annotated[str | None, tyro.conf.arg(metavar="FILE.csv")] = None
    """With --rows: measured rows of your own; predictions are corrected by the errors for similar rows."""
    parallel: Annotated[str | None, tyro.conf.arg(metavar="PLAN|search")] = None
    """Train a large model under a parallel plan, e.g. "dp=16 tp=8 pp=4 zero=1 micro_batch=1 recompute=selective
    sequence_parallel", or search for the fastest plan that fits; --workload names the model (docs/large-models.md)."""
    sequence: Annotated[int, tyro.conf.arg(metavar="TOKENS")] = 8192
    """With --parallel: tokens per sequence."""
    batch: Annotated[int, tyro.conf.arg(metavar="SEQUENCES")] = 1024
    """With --parallel: sequences per step of all GPUs together; with --sites, of each site."""
    accelerator: Literal["a100", "h100", "h200"] = "h100"
    """With --parallel: the accelerator."""
    sites: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """With --parallel: number of sites, each of which runs the whole plan; the strategy exchanges between sites."""
    uplink: Annotated[str | None, tyro.conf.arg(metavar="RATE")] = None
    """With --sites: the rate of each site's link to the others, e.g. 1gbit."""
    json: bool = False
    """Print JSON instead of tables."""
