"""`laconic compare`: train the same model with torch DDP and under several strategies, on slow links, side by side.

With --json, the document that is also in the run's folder as results.json.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from laconic.cli.contest_view import tables, watching
from laconic.cli.terminal import emit, emit_json, emit_sections
from laconic.cluster import Cluster, parse_bandwidth
from laconic.errors import UsageError
from laconic.experiments import config_file
from laconic.experiments.comparison import (
    DEFAULT_STEPS,
    UNLIMITED,
    Comparison,
    Network,
    default_strategies,
    uniform_network,
)
from laconic.experiments.run import run_comparison
from laconic.experiments.tasks import TaskConfig


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Train a model on virtual hosts with torch DDP and under several strategies, and print them side by side."""

    strategy: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="STRATEGY")] = ()
    """A preset or strategy text; repeat for several. Left out: one of each kind that exchanges something in --steps."""
    strategies: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """A file with one strategy per line; empty lines and what follows a # are left out."""
    hosts: int = 4
    """Number of virtual hosts, one process each."""
    bandwidth: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="RATE")] = ()
    """Of every host's link: 10mbit, 1gbit; repeat for several. Left out: 100mbit. "unlimited": no virtual hosts."""
    cluster: Annotated[str | None, tyro.conf.arg(metavar="FILE.toml")] = None
    """Hosts, links and racks from a file, instead of --hosts and --bandwidth."""
    links: Literal["auto", "shaped", "paced"] = "auto"
    """shaped: real links of virtual hosts; paced: held back in software; auto: shaped where this machine allows it."""
    steps: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Optimizer steps under each strategy. Left out: 36."""
    seconds: Annotated[float | None, tyro.conf.arg(metavar="SECONDS")] = None
    """Training time for each strategy, instead of --steps."""
    size: str = "small"
    """Model size: tiny, small, medium, and for text gpt2 (124 M parameters)."""
    batch: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Samples per host and step. Left out: 2 for text, 32 for images."""
    learning_rate: float = 1e-3
    """Of AdamW."""
    seed: int = 0
    """Initial weights and batches."""
    data: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """A text file to train a GPT on. Left out: the Python standard library's source."""
    images: Annotated[str | None, tyro.conf.arg(metavar="FILE.npz")] = None
    """Labelled images to train a CNN on, instead of text."""
    no_communication: bool = False
    """Also train every replica alone, to see how fast a step can be at most."""
    torch_hook: Annotated[tuple[Literal["fp16", "powersgd"], ...], tyro.conf.UseAppendAction] = ()
    """Run torch DDP with its own communication hook as well; repeat for both."""
    target_loss: Annotated[float | None, tyro.conf.arg(metavar="LOSS")] = None
    """Measure the time until this loss. Left out: the loss torch DDP has after four fifths of its steps."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cuda: all ranks share the GPUs of this machine and talk through NCCL; auto: cuda if there is a GPU."""
    mps: Literal["auto", "on", "off"] = "auto"
    """Ranks on a GPU run side by side through NVIDIA's Multi-Process Service; auto: where it can be used."""
    timeout: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 1800.0
    """How long the training on one link may take."""
    config: Annotated[str | None, tyro.conf.arg(metavar="FILE.toml")] = None
    """Repeat a run from its config.toml, instead of the options above."""
    out: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where to keep the run. Left out: runs/TIME-compare."""
    json: bool = False
    """Print JSON instead of tables."""


def run(arguments: Arguments) -> int:
    """Train, keep everything, print."""
    comparison = _comparison(arguments)
    return hold(comparison, out=arguments.out, as_json=arguments.json)


def hold(comparison: Comparison, *, out: str | None, as_json: bool) -> int:
    """Run a comparison with a view of it and print what came out."""
    with watching(comparison) as watcher:
        results, folder = run_comparison(comparison, watcher, out)
    if as_json:
        emit_json(json.loads(results.to_json()))
        return 0
    emit_sections(*tables(results))
    emit(f"\nEverything is in {folder.path}\n")
    if folder.report_path.exists():
        emit(f"Open {folder.report_path}\n")
    return 0


def _comparison(arguments: Arguments) -> Comparison:
    if arguments.config is not None:
        refuse_beside(arguments, "config", Arguments(), but=("out", "json"))
        return config_file.load(arguments.config, "compare")
    if arguments.data is not None and arguments.images is not None:
        raise UsageError("compare: give --data or --images, not both.")
    data = arguments.images or arguments.data
    steps = DEFAULT_STEPS if arguments.steps is None and arguments.seconds is None else arguments.steps
    hosts, networks = read_networks(arguments.cluster, arguments.hosts, arguments.bandwidth, ("100mbit",))
    return Comparison(
        task=TaskConfig(
            kind="images" if arguments.images is not None else "text",
            size=arguments.size,
            batch=arguments.batch if arguments.batch is not None else 2 if arguments.images is None else 32,
            learning_rate=arguments.learning_rate,
            seed=arguments.seed,
            data=str(Path(data).resolve()) if data is not None else None,
        ),
        strategies=read_strategies(arguments.strategy, arguments.strategies, default_strategies(steps)),
        hosts=hosts,
        networks=networks,
        links=arguments.links,
        device=choose_device(arguments.device),
        mps=arguments.mps,
        steps=steps,
        seconds=arguments.seconds,
        torch_hooks=arguments.torch_hook,
        no_communication=arguments.no_communication,
        target_loss=arguments.target_loss,
        timeout_s=arguments.timeout,
    )


def refuse_beside(given: object, option: str, defaults: object, *, but: tuple[str, ...]) -> None:
    """Raise if another option than those in `but` was given beside `option`: it would have no effect."""
    assert dataclasses.is_dataclass(given)
    for other in dataclasses.fields(given):
        if other.name not in (option, *but) and getattr(given, other.name) != getattr(defaults, other.name):
            raise UsageError(f"--{other.name.replace('_', '-')} has no effect beside --{option}; change the file.")


def read_strategies(texts: tuple[str, ...], path: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """Strategies from options and from a file."""
    if path is None:
        return texts or default
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read the strategies in {path}: {reason}.") from exc
    listed = tuple(text for line in lines if (text := line.partition("#")[0].strip()))
    if not listed:
        raise UsageError(f"{path} lists no strategy; write one per line.")
    return (*texts, *listed)


def read_networks(
    cluster: str | None, hosts: int, bandwidths: tuple[str, ...], default: tuple[str, ...]
) -> tuple[int, tuple[Network, ...]]:
    """The number of hosts, and every setting of their links."""
    if cluster is not None:
        if bandwidths or hosts != Arguments.hosts:
            raise UsageError(f"--hosts and --bandwidth have no effect beside --cluster; write them in {cluster}.")
        made = Cluster.load(cluster)
        return made.num_hosts, (Network(name=Path(cluster).stem, cluster=made),)
    return hosts, tuple(
        Network(name=UNLIMITED, cluster=None)
        if text == UNLIMITED
        else uniform_network(hosts, parse_bandwidth(text, "--bandwidth"))
        for text in bandwidths or default
    )


def choose_device(asked: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """The GPU if there is one, unless something else is asked for."""
    if asked != "auto":
        return asked
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
