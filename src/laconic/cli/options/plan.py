"""The options of `laconic plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Say which strategy to use for a model on a cluster, what it gains, and what it costs.

    Strategies are ranked by the predicted time to the loss that plain DDP would reach.
    """

    model: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE.json|SCRIPT.py:FUNCTION")] = None
    """A known workload, a workload file, a Hugging Face config.json, or a function that is profiled here."""
    params: Annotated[str | None, tyro.conf.arg(metavar="N")] = None
    """Parameters of a transformer whose shape is guessed: 350M, 7B; instead of --model."""
    batch: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Sequences per worker and step, for --params and a config.json. Left out: 8."""
    sequence: Annotated[int | None, tyro.conf.arg(metavar="TOKENS")] = None
    """Tokens per sequence, for --params and a config.json. Left out: 1024."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of gradients, for --params and a config.json. Left out: that of the config, else float32."""
    device: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Device of the ranks: h200, h100, a100, v100, l40s, l4, t4, rtx-4090, rtx-3090, cpu. Left out: h200."""
    compute: Annotated[str | None, tyro.conf.arg(metavar="TIME")] = None
    """The time of forward and backward together, e.g. 300ms, if you have measured it."""
    cluster: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE.toml")] = None
    """ethernet-1g, cloud-100g, dgx-h100, pcie-box, two-sites ... or a file, as probe writes."""
    hosts: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Number of hosts."""
    gpus_per_host: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Workers on each host. Left out: 1, or that of the cluster."""
    bandwidth: Annotated[str | None, tyro.conf.arg(metavar="RATE")] = None
    """Bandwidth of every host's link: 1gbit."""
    delay: Annotated[str | None, tyro.conf.arg(metavar="TIME")] = None
    """One-way delay of every host's link: 20ms. Left out: 25us, or that of the cluster."""
    inside: Annotated[str | None, tyro.conf.arg(metavar="RATE")] = None
    """Bandwidth between the GPUs of one host. Left out: PCIe 4.0, or that of the cluster."""
    steps: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Optimizer steps of the whole training. Left out: 20 tokens per parameter, or 10,000 steps."""
    task: Literal["auto", "text", "other"] = "auto"
    """What the model learns; losses were measured with text. auto: text, unless the model is known to be another."""
    max_loss_gap: Annotated[str | None, tyro.conf.arg(metavar="SHARE")] = None
    """The largest share by which the loss may end above plain DDP's at equal steps: 1%."""
    lossless: bool = False
    """Only strategies that compute the same as plain DDP."""
    memory: Annotated[str | None, tyro.conf.arg(metavar="SIZE")] = None
    """Memory of each GPU: 24GB. Left out: that of the device."""
    output: Annotated[str | None, tyro.conf.arg(metavar="FILE.html")] = None
    """Write an offline page with the map of bandwidths and workers, and time against loss."""
    parallel: bool = False
    """Choose a parallel plan for a large model (data, tensor, pipeline, expert and context parallelism, sharding)
    together with the strategy; --batch is then that of all GPUs together (docs/large-models.md)."""
    sites: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """With --parallel: sites, each with the hosts given."""
    uplink: Annotated[str | None, tyro.conf.arg(metavar="RATE")] = None
    """With --sites: the rate of each site's link to the others, e.g. 1gbit."""
    json: bool = False
    """Print JSON instead of text."""
