"""The question: a model, a cluster, the length of training, and the limits of an answer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from laconic.cluster import Cluster
from laconic.cluster.link import usual_link
from laconic.cluster.place import Setting
from laconic.errors import UsageError
from laconic.losses import Scale
from laconic.workload import Workload
from laconic.workload.devices import KnownDevice

_TOKENS_PER_PARAMETER = 20
"""Tokens per parameter of a compute-optimal run. Reference: Hoffmann et al. 2022, arXiv:2203.15556."""
USUAL_STEPS = 10_000
"""Steps of a run whose samples are not known to be tokens."""
_MOST_STEPS = 10**9


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of an answer."""

    max_loss_gap: float | None = None
    """The largest share by which the loss may end above that of torch DDP at equal steps."""
    lossless: bool = False
    """Only strategies that compute the same as torch DDP."""
    memory_bytes: int | None = None
    """A rank's memory for weights, gradients, optimizer and strategy state; None: not checked."""

    def __post_init__(self) -> None:
        if self.lossless and self.max_loss_gap is not None:
            raise UsageError("--max-loss-gap has no effect with --lossless, which allows no gap. Give one of them.")
        if self.max_loss_gap is not None and not 0 <= self.max_loss_gap <= 1:
            raise UsageError(f"--max-loss-gap must be between 0 and 100%, got {self.max_loss_gap:.4g}.")
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise UsageError(f"--memory must be more than 0 B, got {self.memory_bytes} B.")


@dataclass(frozen=True, kw_only=True)
class Question:
    """What `laconic plan` answers."""

    workload: Workload
    setting: Setting
    device: KnownDevice | None = None
    """The device of the ranks, which decides the cost of encoding; None: a CPU."""
    learns_text: bool = True
    """Whether losses measured with language models apply to it."""
    steps: int = USUAL_STEPS
    """Optimizer steps of the whole training."""
    limits: Limits = field(default_factory=Limits)
    measured: tuple[str, ...] = ()
    """The sources of measured figures, in sentences."""
    assumed: tuple[str, ...] = ()
    """The assumptions, in sentences."""

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= _MOST_STEPS:
            raise UsageError(f"steps must be between 1 and {_MOST_STEPS:,}, got {self.steps:,}.")
        if self.setting.workers < 2:
            raise UsageError("a single worker exchanges nothing. Give more --hosts or --gpus-per-host.")

    @property
    def scale(self) -> Scale:
        """The quantities that losses depend on."""
        cluster, workers = self.setting.cluster, self.setting.workers
        return Scale(
            num_parameters=self.workload.num_parameters,
            workers=workers,
            hosts=-(-workers // cluster.devices_per_host),
            steps=self.steps,
        )

    @property
    def is_one_host(self) -> bool:
        """Whether nothing crosses a network."""
        return self.setting.workers <= self.setting.cluster.devices_per_host

    def at_bandwidth(self, bandwidth_bps: float) -> Question:
        """The same question with all links scaled to a bandwidth; for one host, the links inside it."""
        return replace(self, setting=_scaled(self.setting, bandwidth_bps, inside=self.is_one_host))

    def with_hosts(self, hosts: int) -> Question:
        """The same question with another number of hosts, which must be equal and all in use."""
        made = self.setting.cluster.resized(hosts)
        return replace(self, setting=replace(self.setting, cluster=made, workers=made.num_devices))


def likely_steps(num_parameters: int, tokens_per_step: int) -> int:
    """The number of steps that gives the model 20 tokens per parameter."""
    return max(1, min(_MOST_STEPS, round(_TOKENS_PER_PARAMETER * num_parameters / tokens_per_step)))


def rated_bps(setting: Setting, *, inside: bool) -> float:
    """The bandwidth in which crossovers are stated."""
    cluster = setting.cluster
    if inside and cluster.inside is not None:
        return cluster.inside.bandwidth_bps
    return usual_link(cluster.links).bandwidth_bps


def _scaled(setting: Setting, bandwidth_bps: float, *, inside: bool) -> Setting:
    cluster, factor = setting.cluster, bandwidth_bps / rated_bps(setting, inside=inside)
    if factor == 1:
        return setting
    if inside and cluster.inside is not None:
        port = replace(cluster.inside, bandwidth_bps=bandwidth_bps)
        return replace(setting, cluster=replace(cluster, inside=port, measured=None))
    links = tuple(replace(link, bandwidth_bps=link.bandwidth_bps * factor) for link in cluster.links)
    made: Cluster = replace(cluster, links=links, measured=None)
    return replace(setting, cluster=made, bandwidth_bps=setting.bandwidth_bps * factor)
