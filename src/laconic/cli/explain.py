"""`laconic explain STRATEGY`: what it does in words, what it sends, what it cannot be combined with.

With --json, one stable document:

    {"strategy": str,                       canonical text
     "settings": {AXIS: {"name": str, SETTING: value, ..., "with": [{"name": str, ...}]}},
     "workers": int, "params": int, "shards": int,
     "state_bytes": int,                    what each worker keeps between steps, besides model and optimizer
     "wire_bytes_per_step": int,            what each worker sends, from the strategy's own formulas
     "exact": bool,                         false: it depends on the values, and this is the most it can be
     "uncompressed_bytes_per_step": int,    the same for plain fp32 all-reduces, 2 (n-1)/n * 4 params; where workers
                                            hold shards, for FSDP2 as it is, 3 (n-1)/n * 4 params
     "between_hosts_bytes_per_step": int | null,   gradients to other hosts, where ranks of a host add up first
     "ratio": float | null,                 uncompressed / wire; null when nothing is sent (one worker)
     "loss": str,                           what it costs in loss, in words
     "cannot_combine": [str],
     "words": [str]}                        one sentence or more per axis

"settings" is the complete TOML table, so `Strategy.from_table` reads it back to the same strategy. The parameters are
taken to be square matrices, as many as a model of that size may have, and a small rest.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from laconic.architecture import AllReduce
from laconic.architecture.contract import NothingMeasured
from laconic.architecture.servers.layout import HEADER_BYTES, VALUE_BYTES
from laconic.cli.loss_words import HOW_MEASURED, instead, loss_in_words
from laconic.cli.options.explain import Arguments
from laconic.cli.terminal import emit_json, emit_sections, plain_table, summary_with_settings
from laconic.compression import Compressor
from laconic.core.moment import Moment
from laconic.core.tensor import TensorSpec
from laconic.errors import AttachError, UsageError, one_line
from laconic.settings import Method
from laconic.strategy import AXES, Strategy
from laconic.units import human_bytes, human_factor, human_seconds

_LINKS_BPS = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10, "100 Gbit/s": 1e11}
_MOST_WORKERS = 1_000_000
_MOST_PARAMS = 10**15
_MOST_MATRICES = 256
_WIDEST = 2048
_COUNT = re.compile(r"([+-]?(?:\d[\d_]*(?:\.\d+)?|\.\d+)(?:e\+?\d{1,3})?)\s*([kmbgt]?)", re.IGNORECASE | re.ASCII)
_SCALES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_BESIDE_GRADIENTS = (
    "Module buffers (BatchNorm statistics) are broadcast from rank 0 in every step, as DDP does.",
    "A step in which every rank leaves some parameter unused costs one more small exchange: one byte per parameter "
    'tensor, counted as "control" traffic. So does every later step until some rank uses every parameter.',
)


_EXAMPLE_STEPS = 1000


@dataclass(frozen=True, kw_only=True)
class _Explanation:
    strategy: Strategy
    workers: int
    params: int
    shards: int

    @cached_property
    def wire_bytes(self) -> int:
        return self.bytes_of(self.strategy)

    @cached_property
    def uncompressed_bytes(self) -> int:
        whom = self.strategy.architecture
        plain = type(whom)() if whom.holds_shards else AllReduce()
        return self.bytes_of(Strategy(architecture=plain, scheduling=self.strategy.scheduling))

    @property
    def uncompressed(self) -> str:
        """The name of the uncompressed baseline."""
        return "uncompressed FSDP2" if self.strategy.architecture.holds_shards else "uncompressed all-reduce"

    def bytes_of(self, strategy: Strategy) -> int:
        """Bytes that one worker sends per step under a strategy."""
        return sum(times * strategy.wire_bytes_per_step(tensors, self.workers) for times, tensors in self._tensors())

    @cached_property
    def between_hosts(self) -> int | None:
        """Bytes of gradients that one worker sends to other hosts, where the strategy distinguishes hosts."""
        strategy, moment = self.strategy, Moment.steady(self.workers)
        if strategy.architecture.between_by is None or self.workers == 1:
            return None
        return sum(
            times * (strategy.architecture.sent_between(bucket, strategy.codec, moment) or 0)
            for times, tensors in self._tensors()
            for plan in strategy.plans(tensors, self.workers)
            for bucket in plan.buckets
        )

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of state that one worker keeps between steps."""
        return sum(times * self.strategy.state_bytes(tensors) for times, tensors in self._tensors())

    def _tensors(self) -> list[tuple[int, list[TensorSpec]]]:
        return [(times, [tensor.shard(0, self.shards) for tensor in some]) for times, some in _likely(self.params)]

    @property
    def ratio(self) -> float | None:
        return self.uncompressed_bytes / self.wire_bytes if self.wire_bytes else None

    @property
    def exact(self) -> bool:
        return self.strategy.exact()


def run(arguments: Arguments) -> int:
    """Print the explanation."""
    workers = parse_count(arguments.workers, "--workers", at_most=_MOST_WORKERS, example="8")
    params = parse_count(arguments.params, "--params", at_most=_MOST_PARAMS, example="125M or 1.5B")
    shards = parse_count(arguments.shards, "--shards", at_most=_MOST_WORKERS, example="8")
    if arguments.strategy.endswith(".toml"):
        strategy = Strategy.load(arguments.strategy)
    else:
        strategy = Strategy.parse(arguments.strategy)
    if shards > 1 and strategy.architecture.holds_shards:
        raise UsageError(
            f'explain: with "{strategy.architecture.name}" the workers are the shards. Give --workers {shards} and '
            "leave --shards out."
        )
    if arguments.ranks_per_host:
        strategy = _on_hosts(strategy, workers, arguments.ranks_per_host)
    explanation = _Explanation(strategy=strategy, workers=workers, params=params, shards=shards)
    if arguments.json:
        emit_json(_as_json(explanation))
    else:
        emit_sections(
            Text(str(strategy), style="bold"),
            _what_it_does(strategy),
            _what_it_sends(explanation),
            _time_on_links(explanation),
            _bullets("Memory each worker needs besides model, gradients and optimizer", [_memory(explanation)]),
            _bullets("Sent besides, not counted above", _not_counted(explanation)),
            _bullets(f"Loss {HOW_MEASURED}", [line for line in (loss_in_words(strategy), instead(strategy)) if line]),
            _bullets(
                "Cannot be combined with",
                strategy.cannot_combine() or ["Nothing known: every registered wrapper fits on top of it."],
            ),
        )
    return 0


def _on_hosts(strategy: Strategy, workers: int, text: str) -> Strategy:
    """The strategy with its architecture settled for this many workers on each host."""
    size = parse_count(text, "--ranks-per-host", at_most=workers, example="8")
    whom = strategy.architecture
    if not whom.tells_hosts_apart():
        raise UsageError(
            f'explain: --ranks-per-host has no effect: "{whom}" sends the same bytes whichever ranks share a host. '
            "Leave it out."
        )
    hosts = tuple(tuple(range(first, min(first + size, workers))) for first in range(0, workers, size))
    try:
        return replace(strategy, architecture=whom.settled(lambda: hosts, NothingMeasured()))
    except AttachError as exc:
        raise UsageError(f"explain: {exc} Or give another --ranks-per-host.") from exc


def parse_count(text: str, where: str, *, at_most: int, example: str) -> int:
    """Read a whole number from 1 to `at_most`: 25000000, 25_000_000, 25M, 1.5B, 1e9."""
    match = _COUNT.fullmatch(text.strip())
    # Decimal, because 1.1B is 1100000000 and not the nearest float; compared before it becomes an int, because
    # int(Decimal("1e999999")) would fill the memory.
    value = Decimal(match[1].replace("_", "")) * _SCALES[match[2].lower()] if match else None
    if value is None or not 1 <= value <= at_most or value != int(value):
        raise UsageError(
            f'{where} must be a whole number from 1 to {at_most:,}, such as {example}, got "{one_line(text, 60)}".'
        )
    return int(value)


def _width(params: int) -> int:
    """Rows and columns of a likely matrix in a model with that many parameters."""
    widths = (64, 128, 256, 512, 1024)
    return next((width for width in widths if params // width**2 <= _MOST_MATRICES), _WIDEST)


def _likely(params: int) -> list[tuple[int, list[TensorSpec]]]:
    """Parameters as matrices of a likely size: how often a set of tensors occurs, and the tensors."""
    width = _width(params)
    squares = [TensorSpec(f"{number}.weight", (width, width)) for number in range(_MOST_MATRICES)]
    times, few = divmod(params // width**2, _MOST_MATRICES)
    rows, rest = divmod(params % width**2, width)
    others = [TensorSpec("last.weight", (rows, width)), TensorSpec("last.bias", (rest,))]
    last = (1, squares[:few] + [tensor for tensor in others if tensor.numel])
    return [(times, squares), last] if times else [last]


def _as_json(explanation: _Explanation) -> dict[str, object]:
    strategy = explanation.strategy
    return {
        "strategy": str(strategy),
        "settings": tomllib.loads(strategy.to_toml())["strategy"],
        "workers": explanation.workers,
        "params": explanation.params,
        "shards": explanation.shards,
        "state_bytes": explanation.state_bytes,
        "wire_bytes_per_step": explanation.wire_bytes,
        "exact": explanation.exact,
        "uncompressed_bytes_per_step": explanation.uncompressed_bytes,
        "between_hosts_bytes_per_step": explanation.between_hosts,
        "ratio": explanation.ratio,
        "loss": loss_in_words(strategy),
        "cannot_combine": strategy.cannot_combine(),
        "words": [f"{axis}: " + " ".join(_in_words(method) for method in _layers(strategy, axis)) for axis in AXES],
    }


def _layers(strategy: Strategy, axis: str) -> list[Method]:
    """The methods of one axis as text names them: the base, then what wraps it."""
    method: Method = getattr(strategy, axis)
    if isinstance(method, Compressor):
        return [*reversed([*method.layers()])]
    return [method]


def _in_words(method: Method) -> str:
    helps = method.setting_help()
    settings = [
        f"{key}={setting.show(getattr(method, key))}: {helps[key]}" for key, setting in method.declared().items()
    ]
    return " ".join([f"{method.name}. {method.summary()}", *settings])


def _what_it_does(strategy: Strategy) -> Group:
    table = plain_table()
    for axis in AXES:
        for depth, method in enumerate(_layers(strategy, axis)):
            helps = method.setting_help()
            settings = {
                f"{key}={setting.show(getattr(method, key))}": helps[key] for key, setting in method.declared().items()
            }
            summary = Text.assemble((f"+ {method.name}" if depth else method.name, "cyan"), f": {method.summary()}")
            label = Text("" if depth else f"  {axis}", style="dim", no_wrap=True)
            table.add_row(label, summary_with_settings(summary, settings))
    return Group(Text("What it does", style="bold"), table)


def _what_it_sends(explanation: _Explanation) -> Group:
    table = plain_table()
    for label, num_bytes in (
        ("this strategy" if explanation.exact else "this strategy, at most", explanation.wire_bytes),
        ("  of it, gradients to other hosts", explanation.between_hosts),
        (explanation.uncompressed, explanation.uncompressed_bytes),
    ):
        if num_bytes is not None:
            table.add_row(f"  {label}", Text(human_bytes(num_bytes), justify="right"), f"{num_bytes:,} bytes")
    about = "" if explanation.exact else "at worst, "
    if explanation.ratio is None:
        verdict = "one worker sends nothing"
    elif explanation.ratio == 1:
        verdict = f"the same number of bytes as the {explanation.uncompressed}"
    elif explanation.ratio > 1:
        verdict = f"{about}{human_factor(explanation.ratio)} times fewer bytes than the {explanation.uncompressed}"
    else:
        verdict = f"{about}{human_factor(1 / explanation.ratio)} times MORE bytes than the {explanation.uncompressed}"
    strategy = explanation.strategy
    workers = "1 worker" if explanation.workers == 1 else f"{explanation.workers:,} workers"
    average = "" if strategy.synchronization.rounds_per_step() == 1 else ", on average"
    sharded = f" in {explanation.shards:,} shards" if explanation.shards > 1 else ""
    title = f"Bytes each worker sends per step{average} ({workers}, {explanation.params:,} fp32 parameters{sharded})"
    shapes = f"  parameters taken as matrices of {_width(explanation.params):,} x {_width(explanation.params):,}"
    return Group(Text(title, style="bold"), table, Text(f"  {verdict}"), Text(shapes, style="dim"))


def _time_on_links(explanation: _Explanation) -> Group:
    table = plain_table("  link", "this strategy", "uncompressed", numbers=("this strategy", "uncompressed"))
    for link, rate_bps in _LINKS_BPS.items():
        times = [
            human_seconds(8 * sent / rate_bps) for sent in (explanation.wire_bytes, explanation.uncompressed_bytes)
        ]
        table.add_row(f"  {link}", *times)
    return Group(Text("Time per step on the link: at least, from bytes alone", style="bold"), table)


def _memory(explanation: _Explanation) -> str:
    sizes = explanation.state_bytes
    if not sizes:
        return "None."
    return f"{human_bytes(sizes)}: {sizes:,} bytes for residuals, momenta or older copies of parameters."


def _not_counted(explanation: _Explanation) -> tuple[str, ...]:
    strategy, workers = explanation.strategy, explanation.workers
    lines: tuple[str, ...] = ()
    if strategy.synchronization.beginning:
        lines += (_other_steps(explanation),)
    rule = strategy.synchronization
    if rule.deadline_s is not None:
        lines += (
            f"A round ends after {rule.interval} steps or {human_seconds(rule.deadline_s)}, whichever comes first, "
            f"and sends {human_bytes(explanation.wire_bytes * rule.interval)}: with fewer steps, more bytes per step.",
        )
    if strategy.architecture.holds_shards:
        lines += (
            "Counted above: every parameter is gathered for the forward pass and again for the backward pass. What is "
            "gathered inside a smaller group (reshard_after_forward=int) is sent by FSDP2 itself, and not counted.",
        )
    elif strategy.exchanges_gradients():
        lines += _BESIDE_GRADIENTS
    else:
        lines += (
            "Module buffers (BatchNorm statistics) stay on their rank; session.average() makes one model of all.",
        )
    layout = strategy.architecture.servers
    if layout is not None and layout.slots:
        lines += (
            f"Every {VALUE_BYTES} bytes are a frame with a header of {HEADER_BYTES}, and floating-point values come "
            f"with 2 bytes for every 1024. The aggregator gets {human_bytes(explanation.wire_bytes)} from each of "
            f"{workers} workers and sends each as much; it needs memory for {2 * layout.slots} frames.",
        )
    elif layout is not None:
        servers = layout.num_servers(workers)
        sent = human_bytes(round(explanation.wire_bytes * workers / servers))
        usual = " on average" if layout.by_links else ""
        lines += (
            f"Each of {servers} server(s) gets {sent} per step from all workers{usual} and sends about as much back; "
            "every message has a header of about 100 bytes.",
        )
    return lines


def _other_steps(explanation: _Explanation) -> str:
    """A sentence on the bytes of steps in which the synchronization does not use the strategy's compressor."""
    when = explanation.strategy.synchronization
    planned = when.planned(_EXAMPLE_STEPS) if when.asks_for_length else when
    count = sum(planned.begins(step) for step in range(_EXAMPLE_STEPS))
    training = f"a training of {_EXAMPLE_STEPS:,}" if when.asks_for_length else f"the first {_EXAMPLE_STEPS:,}"
    gradients = Strategy.parse(f"bsp / all_reduce / {when.beginning} / {explanation.strategy.scheduling}")
    sent = human_bytes(explanation.bytes_of(gradients))
    return f"In {count} steps of {training}, {when.name} sends gradients by {when.beginning} instead: {sent} each."


def _bullets(title: str, lines: tuple[str, ...] | list[str]) -> Group:
    return Group(Text(title, style="bold"), *(Padding(Text(line), (0, 0, 0, 2)) for line in lines))
