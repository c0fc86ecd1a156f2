"""Which parallel plan to train a large model with, and which strategy exchanges its data-parallel dimension.

Both are chosen together, because each affects the cost of the other. GPUs are treated as one island, whose
data-parallel ranks exchange as the framework does, and as several equal islands that each run the whole plan and
exchange with each other by a strategy. Islands are sites where there are several sites, else groups of whole hosts;
inside one host the strategy runs among all data-parallel ranks.

    time to DDP's loss = steps x step x (steps needed / steps of bsp)

Inside an island the fastest plans that fit are searched first; each strategy is then timed with the fastest of them
that leave memory for its state. Choices that are predicted to differ by less than CLOSE count as equal: a lossless one,
on the fewest islands, comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from laconic.cluster import Cluster, Link
from laconic.errors import ConfigurationError, UsageError
from laconic.losses import LossCost, Scale, loss_cost
from laconic.planner.answer import CLOSE
from laconic.planner.candidates import candidates_between_islands
from laconic.planner.question import Limits
from laconic.simulator.parallel.accelerator import Accelerator
from laconic.simulator.parallel.exchange import Islands, StrategyExchange
from laconic.simulator.parallel.fabric import Fabric, fabric_of
from laconic.simulator.parallel.memory import Memory, fits, memory
from laconic.simulator.parallel.plan import Plan
from laconic.simulator.parallel.search import Found, search
from laconic.simulator.parallel.software import MEGATRON_CORE, Software
from laconic.simulator.parallel.step import Exchange, StepTime, step_time
from laconic.simulator.parallel.system import Job, System
from laconic.strategy import Strategy

_MOST_ISLANDS = 16
"""Groups of hosts; published losses of local updates end at 8 replicas."""
_PLANS_SEARCHED = 24
"""Plans kept inside an island; each strategy is timed with the fastest that leaves memory for its state."""
_ROOMY_SHARE = 0.6
"""Share of the memory: a plan below it leaves 12 bytes per parameter besides the 18 of model and optimizer."""
_MOST_BPS = 1e13
"""The combined rate of an island's NICs is capped here: at that rate an exchange hides behind compute."""
_HOPELESS = 2.0
"""Islands that take this many times as long as the best choice so far, even with a free exchange, are skipped."""
NEXT = 5
"""Choices shown after the best."""

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class ParallelQuestion:
    """What `laconic plan --parallel` answers."""

    job: Job
    """The job; its batch is that of all sites together."""
    cluster: Cluster
    """One site."""
    accelerator: Accelerator
    sites: int = 1
    uplink: Link | None = None
    """Bandwidth from each site to the others."""
    steps: int
    """Optimizer steps of the whole training."""
    limits: Limits = field(default_factory=Limits)
    software: Software = MEGATRON_CORE

    def __post_init__(self) -> None:
        if self.sites < 1:
            raise UsageError(f"--sites must be at least 1, got {self.sites}.")
        if self.steps < 1:
            raise UsageError(f"--steps must be at least 1, got {self.steps}.")
        if (self.uplink is None) != (self.sites == 1):
            raise UsageError(
                "plan: --sites and --uplink go together: how many sites, and the rate of each site's link."
            )
        if self.job.global_batch % self.sites:
            raise ConfigurationError(
                f"a batch of {self.job.global_batch} sequences is not divisible by {self.sites} sites. The nearest "
                f"batch that is divisible has {max(1, round(self.job.global_batch / self.sites)) * self.sites}."
            )

    @property
    def gpus(self) -> int:
        """GPUs of all sites."""
        return self.sites * self.cluster.num_devices

    @property
    def system(self) -> System:
        """The hardware and links of one site."""
        device = self.accelerator
        if self.limits.memory_bytes is not None:
            device = replace(device, memory_bytes=float(self.limits.memory_bytes))
        return System(accelerator=device, fabric=fabric_of(self.cluster, device.name), software=self.software)


@dataclass(frozen=True, kw_only=True)
class ParallelChoice:
    """A plan and a strategy."""

    plan: Plan
    """Of one island."""
    islands: int
    strategy: Strategy | None
    """The strategy between islands, or among the data-parallel ranks of one host; None: the framework's own
    exchange."""
    time: StepTime
    memory: Memory
    loss: LossCost | None
    """None: not known well enough."""
    seconds: float
    """The time to plain DDP's final loss; where the steps needed are unknown, DDP's number of steps is assumed."""

    @property
    def loses_nothing(self) -> bool:
        """Whether it computes what plain DDP computes."""
        return self.loss is not None and self.loss.known == "same"

    @property
    def exchange_share(self) -> float:
        """The time that the exchange among replicas adds to a step."""
        return (self.time.exchange_s + self.time.shard_s) / self.time.total_s


@dataclass(frozen=True, kw_only=True)
class ParallelAnswer:
    """The result of a search."""

    question: ParallelQuestion
    choices: tuple[ParallelChoice, ...]
    """Choices that fit and are within the limits, the best first."""
    unknown: tuple[ParallelChoice, ...]
    """Choices whose loss is not known well enough, the fastest step first."""
    own: ParallelChoice | None
    """The fastest lossless choice, with which strategies are compared. None: no lossless one was found."""
    tried: int
    fitting: int

    @property
    def best(self) -> ParallelChoice:
        """The one to use."""
        return self.choices[0]

    @property
    def runners_up(self) -> tuple[ParallelChoice, ...]:
        """The next ones."""
        return self.choices[1 : 1 + NEXT]


@dataclass(frozen=True)
class _Layout:
    """GPUs divided into islands, each with its part of the batch."""

    islands: int
    gpus: int
    """Of one island."""
    job: Job
    """Of one island."""
    uplink: Link | None = None
    """Of one island; None: there is one island."""
    by_strategy: bool = True
    """Whether a strategy exchanges between islands, or among the data-parallel ranks of one; else the framework."""

    @property
    def zeros(self) -> tuple[int, ...]:
        """Degrees of sharding inside: a strategy among data-parallel ranks needs unsharded parameters."""
        return (0,) if self.by_strategy and self.uplink is None else (0, 1, 3)


def plan_in_parallel(question: ParallelQuestion, progress: Progress | None = None) -> ParallelAnswer:
    """Search; raises ConfigurationError where no plan fits."""
    system = question.system
    layouts = list(_layouts(question, system.fabric))
    found: list[ParallelChoice] = []
    tried = fitting = 0
    for number, layout in enumerate(layouts, 1):
        if progress is not None:
            progress(number, len(layouts), "plans")
        try:
            inside = search(layout.job, layout.gpus, system, keep=_PLANS_SEARCHED, zeros=layout.zeros)
        except ConfigurationError:
            continue  # no plan is legal for this part of the batch; other divisions may have one
        tried, fitting = tried + inside.tried, fitting + inside.fitting
        if layout.by_strategy:
            found += _with_strategies(question, system, layout, inside.best, _least_s(found))
        else:
            found += [_own(question, one) for one in inside.best[: 1 + NEXT]]
    ranked = [one for one in found if one.loss is not None]
    if not ranked:
        raise ConfigurationError(
            f"{question.job.model.name or 'the model'} does not fit under any of {tried} plans for {question.gpus} "
            f"GPUs with {system.accelerator.memory_bytes / 1e9:.0f} GB each. Give more --hosts, a --batch with more "
            "divisors, or a --device with more memory."
        )
    ranked.sort(key=lambda one: one.seconds)
    close = [one for one in ranked if one.seconds <= (1 + CLOSE) * ranked[0].seconds]
    best = min(close, key=lambda one: (not one.loses_nothing, one.islands, one.seconds))
    lossless = [one for one in ranked if one.loses_nothing]
    return ParallelAnswer(
        question=question,
        choices=(best, *(one for one in ranked if one is not best)),
        unknown=tuple(
            sorted((one for one in found if one.loss is None), key=lambda one: one.time.total_s),
        ),
        own=min(lossless, key=lambda one: one.seconds, default=None),
        tried=tried,
        fitting=fitting,
    )


def _layouts(question: ParallelQuestion, fabric: Fabric) -> Iterator[_Layout]:
    """One island first, where there is one site; then several."""
    job, cluster, sites = question.job, question.cluster, question.sites
    if sites > 1:
        yield _Layout(sites, cluster.num_devices, replace(job, global_batch=job.global_batch // sites), question.uplink)
        return
    yield _Layout(1, cluster.num_devices, job, by_strategy=False)
    if cluster.num_hosts == 1:
        yield _Layout(1, cluster.num_devices, job)
        return
    delay_s = cluster.links[0].delay_s
    for islands in range(2, min(cluster.num_hosts, _MOST_ISLANDS) + 1):
        if cluster.num_hosts % islands or job.global_batch % islands:
            continue
        gpus = cluster.num_devices // islands
        rate_bps = min(8 * gpus * fabric.between_bytes_per_s, _MOST_BPS)
        uplink = Link(bandwidth_bps=rate_bps, delay_s=delay_s)
        yield _Layout(islands, gpus, replace(job, global_batch=job.global_batch // islands), uplink)


def _own(question: ParallelQuestion, one: Found) -> ParallelChoice:
    same = loss_cost(Strategy(), _scale(question, 1))
    return ParallelChoice(
        plan=one.plan,
        islands=1,
        strategy=None,
        time=one.time,
        memory=one.memory,
        loss=same,
        seconds=question.steps * one.time.total_s,
    )


def _least_s(found: Sequence[ParallelChoice]) -> float:
    return min((one.seconds for one in found if one.loss is not None), default=float("inf"))


def _with_strategies(
    question: ParallelQuestion, system: System, layout: _Layout, plans: Sequence[Found], best_s: float
) -> list[ParallelChoice]:
    """Every strategy with the fastest plan that leaves memory for its state."""
    found: list[ParallelChoice] = []
    if not plans or question.steps * plans[0].time.total_s > _HOPELESS * best_s:
        return found
    roomy: tuple[Found, ...] | None = None
    for strategy in candidates_between_islands():
        if not _allowed(loss_cost(strategy, _scale(question, max(2, layout.islands))), question.limits):
            continue
        made = _timed(question, system, layout, strategy, plans)
        if made is None:
            if roomy is None:
                roomy = _roomy(system, layout)
            made = _timed(question, system, layout, strategy, roomy)
        if made is not None:
            found.append(made)
    return found


def _roomy(system: System, layout: _Layout) -> tuple[Found, ...]:
    """The fastest plans that leave enough memory for any strategy."""
    device = system.accelerator
    smaller = replace(system, accelerator=replace(device, memory_bytes=_ROOMY_SHARE * device.memory_bytes))
    return search(layout.job, layout.gpus, smaller, keep=_PLANS_SEARCHED, zeros=layout.zeros).best


def _timed(
    question: ParallelQuestion, system: System, layout: _Layout, strategy: Strategy, plans: Sequence[Found]
) -> ParallelChoice | None:
    """The strategy with the first plan that leaves memory for its state; None if none does."""
    exchange = _exchange(strategy, layout)
    for one in plans:
        replicas = layout.islands if layout.islands > 1 else one.plan.dp * one.plan.cp
        if replicas == 1 or (layout.uplink is None and one.plan.ep > 1):
            continue  # a single replica; or not modelled: experts differ between replicas
        kept = exchange.kept_bytes(layout.job, one.plan, system)
        needed = memory(layout.job, one.plan, system.software, residual_bytes=kept)
        if not fits(needed, system):
            continue
        loss = loss_cost(strategy, _scale(question, replicas))
        time = step_time(layout.job, one.plan, system, exchange=exchange)
        return ParallelChoice(
            plan=one.plan,
            islands=layout.islands,
            strategy=strategy,
            time=time,
            memory=needed,
            loss=loss if loss is None or loss.known != "parts" else None,
            seconds=question.steps * time.total_s * (1.0 if loss is None else loss.ratio),
        )
    return None


def _exchange(strategy: Strategy, layout: _Layout) -> Exchange:
    if layout.uplink is None:
        return StrategyExchange(strategy)
    return Islands(strategy, layout.islands, layout.uplink)


def _allowed(loss: LossCost | None, limits: Limits) -> bool:
    if loss is None or loss.known == "same":
        return loss is not None or not limits.lossless
    return not limits.lossless and (limits.max_loss_gap is None or loss.gap <= limits.max_loss_gap)


def _scale(question: ParallelQuestion, replicas: int) -> Scale:
    return Scale(
        num_parameters=question.job.model.num_parameters, workers=replicas, hosts=replicas, steps=question.steps
    )
