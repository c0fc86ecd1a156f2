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
    """Sequences per worker and step, for --params and a config.json. If omitted: 8."""
    sequence: Annotated[int | None, tyro.conf.arg(metavar="TOKENS")] = None
    """Tokens per sequence, for --params and a config.json. If omitted: 1024."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of gradients, for --params and a config.json. If omitted: that of the config, else float32."""
    device: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Device of the ranks: h200, h100, a100, v100, l40s, l4, t4, rtx-4090, rtx-3090, cpu. If omitted: h200."""
    compute: Annotated[str | None, tyro.conf.arg(metavar="TIME")] = None
    """The time of forward and backward together, e.g. 300ms, if you have measured it."""
    cluster: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE.toml")] = None
    """ethernet-1g, cloud-100g, dgx-h100, pcie-box, two-sites ... or a file (laconic probe writes one)."""
    hosts: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Number of hosts."""
    gpus_per_host: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Workers on each host. If omitted: 1, or that of the cluster."""
    bandwidth: Annotated[str | None, tyro.conf.arg(metavar="RATE")] = None
    """Bandwidth of every host's link: 1gbit."""
    delay: Annotated[str | None, tyro.conf.arg(metavar="TIME")] = None
    """One-way delay of every host's link: 20ms. If omitted: 25us, or that of the cluster."""
    inside: Annotated[str | None, tyro.conf.arg(metavar="RATE")] = None
    """Bandwidth between the GPUs of one host. If omitted: PCIe 4.0, or that of the cluster."""
    steps: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Optimizer steps of the whole training. If omitted: enough for 20 tokens per parameter, or else 10,000."""
    task: Literal["auto", "text", "other"] = "auto"
    """What the model learns; losses were measured with text. auto: text, unless the model is known to learn images."""
    max_loss_gap: Annotated[str | None, tyro.conf.arg(metavar="SHARE")] = None
    """How far the final loss may be above that of plain DDP after the same number of steps: 1%."""
    lossless: bool = False
    """Only strategies that compute the same as plain DDP."""
    memory: Annotated[str | None, tyro.conf.arg(metavar="SIZE")] = None
    """Memory of each GPU: 24GB. If omitted: that of the device."""
    output: Annotated[str | None, tyro.conf.arg(metavar="FILE.html")] = None
    """Write an offline page: the best strategy for each bandwidth and number of workers, and time against loss."""
    parallel: bool = False
    """Choose a parallel plan for a large model (data, tensor, pipeline, expert and context parallelism, sharding)
    together with the strategy; --batch is then that of all GPUs together (docs/large-models.md)."""
    sites: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """With --parallel: number of sites; each has all the hosts given by --hosts or --cluster."""
    uplink: Annotated[str | None, tyro.conf.arg(metavar="RATE")] = None
    """With --sites: the rate of each site's link to the others, e.g. 1gbit."""
    json: bool = False
    """Print JSON instead of text."""
