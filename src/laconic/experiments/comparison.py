"""The description of a comparison: a task, strategies, and settings of the links."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch

from laconic.cluster import Cluster, Link
from laconic.errors import UsageError, did_you_mean, one_line
from laconic.experiments.tasks import TaskConfig
from laconic.lab.mps import MpsChoice
from laconic.lab.pacing import LinksChoice
from laconic.report.results import NO_COMMUNICATION, TORCH_DDP, TORCH_HOOKS, TORCH_HSDP
from laconic.strategy import PRESETS, Strategy
from laconic.units import format_rate

DEFAULT_STRATEGIES: tuple[str, ...] = (
    "ddp",
    "ddp-bf16",
    "bsp / all_reduce / int8 / fusion",
    "bsp / all_reduce / int4 + error_feedback / fusion",
    "topk-int8-ef",
    "powersgd",
    "demo-int4",
    "streaming_diloco(period=16) / all_reduce / int4 + error_feedback / fusion",
)
"""One strategy per family: DDP's own, fewer bits, few entries, low rank, momentum instead of gradients, local steps."""
SHARDED_STRATEGIES: tuple[str, ...] = (
    "bsp / all_reduce / none / fusion",
    "bsp / all_reduce / int8 + error_feedback / fusion",
    "bsp / all_reduce / int4 + error_feedback / fusion",
    "bsp / sharded(weights=int8) / int4 + error_feedback / fusion",
    "streaming_diloco(period=16) / all_reduce / int4 + error_feedback / fusion",
)
"""The default strategies where the ranks of a host share one model; the fourth shards it over all hosts instead."""
DEFAULT_STEPS = 36
"""Two rounds of the strategy that exchanges most rarely."""


def default_strategies(steps: int | None, *, sharded: bool = False) -> tuple[str, ...]:
    """The DEFAULT_STRATEGIES or SHARDED_STRATEGIES that exchange within this many steps."""
    texts = SHARDED_STRATEGIES if sharded else DEFAULT_STRATEGIES
    rules = {text: Strategy.parse(text).synchronization for text in texts}
    return tuple(text for text, rule in rules.items() if steps is None or steps >= rule.interval + rule.delay)


@dataclass(frozen=True, kw_only=True)
class Network:
    """One setting of the links."""

    name: str
    cluster: Cluster | None
    """None: ranks on this machine, with unlimited links."""


UNLIMITED = "unlimited"


def uniform_network(num_hosts: int, bandwidth_bps: float) -> Network:
    """Hosts with equal links."""
    return Network(
        name=format_rate(bandwidth_bps), cluster=Cluster.uniform(num_hosts, Link(bandwidth_bps=bandwidth_bps))
    )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A complete description of a comparison, so that the same Comparison gives the same run."""

    kind: Literal["compare", "replay"] = "compare"
    task: TaskConfig = field(default_factory=TaskConfig)
    strategies: tuple[str, ...] = DEFAULT_STRATEGIES
    hosts: int = 4
    ranks_per_host: int = 1
    sharded: bool = False
    """Whether FSDP2 shards one model over the ranks of each host; the baseline is then PyTorch's HSDP."""
    networks: tuple[Network, ...]
    """The networks; there is one contest on each."""
    links: LinksChoice = "auto"
    device: Literal["cpu", "cuda"] = "cpu"
    mps: MpsChoice = "auto"
    """Whether ranks on a GPU run in parallel through NVIDIA's Multi-Process Service; auto: where it can be used."""
    steps: int | None = DEFAULT_STEPS
    seconds: float | None = None
    """Training time of each strategy, instead of `steps`."""
    torch_hooks: tuple[str, ...] = ()
    """torch DDP's own communication hooks to compare with: fp16, powersgd."""
    torch_ddp: bool = True
    """Whether the baseline runs as well: torch DDP, or HSDP where models are sharded."""
    no_communication: bool = False
    """Also train every replica alone, which gives the fastest possible step."""
    target_loss: float | None = None
    """None: torch DDP's loss after four fifths of its steps."""
    timeout_s: float = 1800.0
    """How long the contest on one link may take."""

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise UsageError(f"{self.kind}: give either steps or seconds.")
        for name, least in (("hosts", 1), ("ranks_per_host", 1), ("steps", 1), ("timeout_s", 1)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise UsageError(f"{self.kind}: {name} must be >= {least}, got {value}.")
        if self.seconds is not None and not 0 < self.seconds < float("inf"):
            raise UsageError(f"{self.kind}: seconds must be > 0, got {self.seconds}.")
        if self.target_loss is not None and not math.isfinite(self.target_loss):
            raise UsageError(f"{self.kind}: target_loss must be a finite number, got {self.target_loss}.")
        if not self.strategies:
            raise UsageError(f"{self.kind}: give at least one strategy.")
        if not self.networks:
            raise UsageError(f"{self.kind}: give at least one bandwidth or a cluster.")
        names = [network.name for network in self.networks]
        if len(set(names)) < len(names):
            raise UsageError(f"{self.kind}: every link setting must be given once, got {', '.join(names)}.")
        for network in self.networks:
            if network.cluster is not None and network.cluster.num_hosts != self.hosts:
                raise UsageError(
                    f"{self.kind}: hosts is {self.hosts}, but {network.name} has {network.cluster.num_hosts} hosts."
                )
        if self.kind == "replay" and self.target_loss is not None:
            raise UsageError("replay: target_loss has no effect; replayed compute learns nothing.")
        if self.sharded:
            self._check_sharded()
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("device cuda: torch finds no GPU here. Use cpu.")
        if self.device == "cpu" and self.mps != "auto":
            raise UsageError(f"{self.kind}: mps has no effect on a CPU. Leave it out.")
        for strategy in self.strategies:
            self._check_rounds(Strategy.parse(strategy))
        for hook in self.torch_hooks:
            if hook not in TORCH_HOOKS:
                shown = one_line(hook, 40)
                raise UsageError(f'torch DDP has no hook "{shown}" here. {did_you_mean(hook, TORCH_HOOKS)}')

    def _check_sharded(self) -> None:
        if self.ranks_per_host < 2 or self.hosts < 2:
            raise UsageError(
                f"{self.kind}: sharded models are shared by the ranks of a host and averaged between hosts. Give "
                f"--hosts 2 or more and --ranks-per-host 2 or more, got {self.hosts} and {self.ranks_per_host}."
            )
        if self.torch_hooks:
            raise UsageError(
                f"{self.kind}: --torch-hook has no effect together with --sharded, where torch DDP is not run."
            )

    def _check_rounds(self, strategy: Strategy) -> None:
        rule = strategy.synchronization
        if rule.deadline_s is not None:
            raise UsageError(
                f'{self.kind}: rounds of "{strategy}" end by time, but here all ranks must make the same number of '
                "steps. Give a period instead."
            )
        if self.steps is not None and self.steps < rule.interval + rule.delay:
            raise UsageError(
                f'{self.kind}: "{strategy}" exchanges something every {rule.interval} steps, so in {self.steps} steps '
                f"it would show nothing. Give at least {2 * (rule.interval + rule.delay)} steps, or a shorter period."
            )
        settled = strategy.scheduling.settles_after
        if self.steps is not None and self.steps <= settled and strategy.scheduling.defers:
            raise UsageError(
                f'{self.kind}: the schedule of "{strategy}" is found in its first {settled} steps. Give at least '
                f"{2 * settled} steps."
            )

    @property
    def contenders(self) -> tuple[str, ...]:
        """The baseline and the strategies in full; two spellings of one strategy are one contender."""
        beside = [TORCH_HOOKS[hook] for hook in self.torch_hooks] + [NO_COMMUNICATION] * self.no_communication
        beside = [TORCH_HSDP if self.sharded else TORCH_DDP] * self.torch_ddp + beside
        return tuple(dict.fromkeys([*beside, *(str(Strategy.parse(text)) for text in self.strategies)]))


def short_name(strategy: str) -> str:
    """The name of an equal preset, if there is one."""
    return next((name for name, (text, _) in PRESETS.items() if str(Strategy.parse(text)) == strategy), strategy)
