"""The options of `laconic compare`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Train a model on virtual hosts with torch DDP and several strategies, and print the results side by side."""

    strategy: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[STRATEGY ...]")] = ()
    """Presets, or one-line texts in quotes. If omitted: one of each kind that exchanges something in --steps."""
    strategies: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """A file with one strategy per line; empty lines and comments after a # are skipped."""
    plan: bool = False
    """Let the planner choose the strategies, and compare its predictions with the measurements."""
    hosts: int = 4
    """Number of virtual hosts."""
    ranks_per_host: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Processes on every host, which share its link."""
    sharded: bool = False
    """FSDP2 shards the model over the ranks of a host, and torch HSDP is the baseline in place of torch DDP."""
    bandwidth: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="RATE")] = ()
    """Bandwidth of every host's link: 10mbit, 1gbit; repeat for several. If omitted: 100mbit. "unlimited": no virtual
    hosts."""
    cluster: Annotated[str | None, tyro.conf.arg(metavar="FILE.toml")] = None
    """Hosts, links and racks from a file, instead of --hosts and --bandwidth."""
    links: Literal["auto", "shaped", "paced"] = "auto"
    """shaped: real links of virtual hosts; paced: limited in software; auto: shaped where this machine allows it."""
    steps: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Optimizer steps under each strategy. If omitted: 36."""
    seconds: Annotated[float | None, tyro.conf.arg(metavar="SECONDS")] = None
    """Training time for each strategy, instead of --steps."""
    size: str = "small"
    """Model size: tiny, small, medium, and for text gpt2 (124 M parameters)."""
    batch: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Samples per host and step. If omitted: 2 for text, 32 for images."""
    learning_rate: float = 1e-3
    """Learning rate of AdamW."""
    seed: int = 0
    """Seed of initial weights and batches."""
    data: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """A text file to train a GPT on. If omitted: the Python standard library's source."""
    images: Annotated[str | None, tyro.conf.arg(metavar="FILE.npz")] = None
    """Labelled images to train a CNN on, instead of text."""
    no_communication: bool = False
    """Also train every replica alone, which gives the fastest possible step."""
    torch_hook: Annotated[tuple[Literal["fp16", "powersgd"], ...], tyro.conf.UseAppendAction] = ()
    """Also run torch DDP with this communication hook of its own; repeat for both."""
    target_loss: Annotated[float | None, tyro.conf.arg(metavar="LOSS")] = None
    """Measure the time until this loss. If omitted: the loss torch DDP has after four fifths of its steps."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cuda: all ranks share the GPUs of this machine and communicate through NCCL; auto: cuda if there is a GPU."""
    mps: Literal["auto", "on", "off"] = "auto"
    """Ranks on a GPU run in parallel through NVIDIA's Multi-Process Service; auto: where it can be used."""
    timeout: Annotated[str, tyro.conf.arg(metavar="TIME")] = "30min"
    """How long the training on one link may take."""
    config: Annotated[str | None, tyro.conf.arg(metavar="FILE.toml")] = None
    """Repeat a run from its config.toml, instead of the options above."""
    output: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder of the run. If omitted: runs/TIME-compare."""
    json: bool = False
    """Print JSON instead of tables."""
