"""The options of `laconic schedule`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Simulate many jobs on one cluster: completion times under several policies.

    Example: laconic schedule --trace jobs.csv --cluster ethernet-10g --hosts 8 --devices 4 --policy fifo --policy srtf
    """

    trace: Annotated[str | None, tyro.conf.arg(metavar="FILE.csv")] = None
    """The jobs, one per line: job,arrival_s,gpus,duration_s or steps ... (docs/schedule.md)."""
    throughputs: Annotated[str | None, tyro.conf.arg(metavar="FILE.csv")] = None
    """Measured speeds of the trace's models: model,gpus,steps_per_s and, if need be, worker_type."""
    worker: Annotated[str, tyro.conf.arg(metavar="TYPE")] = ""
    """The worker type of --throughputs to use; needed if the file has several."""
    services: Annotated[str | None, tyro.conf.arg(metavar="FILE.csv")] = None
    """Inference services that take GPUs first: service,arrival_s,duration_s,requests_per_s,request_s,latency_s,gpus."""
    cluster: Annotated[str, tyro.conf.arg(metavar="NAME|FILE.toml")] = "ethernet-10g"
    """ethernet-1g, ethernet-10g, cloud-100g, dgx-h100, pcie-box, two-sites ... or a file (laconic probe writes one)."""
    hosts: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Number of hosts, instead of the cluster's."""
    devices: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """GPUs per host, instead of the cluster's."""
    bandwidth: Annotated[str | None, tyro.conf.arg(metavar="RATE")] = None
    """Bandwidth of every host's link, instead of the cluster's, e.g. 10gbit."""
    inside: Annotated[str | None, tyro.conf.arg(metavar="RATE")] = None
    """Bandwidth between the GPUs of one host, instead of the cluster's: 252gbit."""
    policy: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME[(SETTING=VALUE)]")] = ()
    """fifo, srtf, srsf, las, max_min_fairness, finish_time_fairness, max_sum_throughput, min_total_duration, allox,
    pollux, rack_aware, cassini, strategy_aware; repeat for several. If omitted: fifo, srtf, las, max_min_fairness."""
    fidelity: Literal["flow", "throughput"] = "flow"
    """flow: jobs on several hosts share links; throughput: only GPUs are modelled."""
    round: Annotated[str, tyro.conf.arg(metavar="TIME")] = "120s"
    """How long jobs keep their GPUs before the policy decides again."""
    start: Annotated[str, tyro.conf.arg(metavar="TIME")] = "30s"
    """Time from getting GPUs to the first step."""
    checkpoint: Annotated[str, tyro.conf.arg(metavar="TIME")] = "0s"
    """Time to save the state of a job that loses its GPUs."""
    migration: Annotated[str, tyro.conf.arg(metavar="TIME")] = "0s"
    """Additional time for a job that continues on other hosts."""
    ahead: Annotated[str, tyro.conf.arg(metavar="TIME")] = "0s"
    """How long before a round begins it is planned; what happens in that time counts for the plan after it."""
    output: Annotated[str | None, tyro.conf.arg(metavar="FILE.html")] = None
    """Write an offline page: a Gantt chart, loads of links, completion times."""
    reference: Annotated[Literal["shockwave"] | None, tyro.conf.arg(metavar="NAME")] = None
    """Predict a published run instead: shockwave, 120 jobs on 32 real GPUs. Needs --tables."""
    tables: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """With --reference: the folder of its tables. If omitted: that in the environment variable LACONIC_TABLES."""
    json: bool = False
    """Print JSON instead of tables."""
