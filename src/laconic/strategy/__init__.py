"""Strategy: one choice per axis. Text, Python objects and TOML give the same object and print the same text."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

import torch

from laconic.architecture import ARCHITECTURES, AllReduce, Architecture
from laconic.compression import COMPRESSORS, ByStep, Compressor, NoCompression, TwoLevels, Wrapper
from laconic.core.moment import Moment
from laconic.core.plan import Bucket, Plan
from laconic.core.stateful import BucketState, Resize
from laconic.core.tensor import TensorSpec
from laconic.core.timing import Timing
from laconic.errors import (
    InvalidSetting,
    MethodError,
    StrategyError,
    SyntaxProblem,
    UnknownName,
    one_line,
    unknown_strategy,
)
from laconic.grammar import Call, parse_text
from laconic.registry import Registry
from laconic.scheduling import SCHEDULES, Fusion, Schedule
from laconic.scheduling.contract import one_bucket_per_kind
from laconic.settings import Method, found
from laconic.strategy.legality import Parts, cannot_combine, check_legal
from laconic.strategy.presets import PRESETS as PRESETS
from laconic.strategy.presets import SEVEN as SEVEN
from laconic.strategy.toml import check_axes, read_method, read_table, write_value
from laconic.synchronization import SYNCHRONIZATIONS, Bsp, Synchronization

AXES: dict[str, Registry] = {
    "synchronization": SYNCHRONIZATIONS,
    "architecture": ARCHITECTURES,
    "compression": COMPRESSORS,
    "scheduling": SCHEDULES,
}
"""The four axes in the order in which strategy text names them."""


@dataclass(frozen=True)
class Strategy:
    """One choice per axis, checked to fit together when it is built."""

    synchronization: Synchronization = Bsp()
    architecture: Architecture = AllReduce()
    compression: Compressor = NoCompression()
    scheduling: Schedule = Fusion()

    def __post_init__(self) -> None:
        for axis, registry in AXES.items():
            method = getattr(self, axis)
            if not isinstance(method, registry.contract):
                raise StrategyError(
                    f"{axis} must be a {registry.contract.__name__} object, got {found(method)}. "
                    "For text use Strategy.parse()."
                )
        check_legal(self._parts())

    def _parts(self) -> Parts:
        return Parts(self.synchronization, self.architecture, self.compression, self.scheduling)

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """Read a preset's name or one-line text."""
        if not isinstance(text, str):
            raise SyntaxProblem(f"a strategy is text or a Strategy, got {found(text)}.")
        preset = PRESETS.get(text.strip())
        axes = parse_text(preset[0] if preset else text)
        if preset is None and axes[0][0].name in PRESETS and axes[0][0].name not in SYNCHRONIZATIONS:
            name = axes[0][0].name
            raise SyntaxProblem(
                f'strategy: the preset "{name}" cannot be combined. To change it, write it out: "{PRESETS[name][0]}".'
            )
        if len(axes) > len(AXES):
            raise SyntaxProblem(
                f'strategy "{one_line(text, 100)}" has {len(axes)} choices; at most {len(AXES)} are allowed: '
                f"{' / '.join(AXES)}."
            )
        if len(axes) == 1 and axes[0][0].name not in SYNCHRONIZATIONS:
            raise _not_a_strategy(axes[0][0].name)
        return cls._assemble({axis: _from_calls(axis, calls) for axis, calls in zip(AXES, axes, strict=False)})

    @classmethod
    def from_toml(cls, text: str) -> Strategy:
        """Read a TOML document."""
        return cls.from_table(read_table(text, list(AXES)))

    @classmethod
    def from_table(cls, table: Mapping[str, object]) -> Strategy:
        """Read an already parsed TOML table."""
        check_axes(table, list(AXES))
        return cls._assemble({axis: _from_value(axis, value) for axis, value in table.items()})

    @classmethod
    def load(cls, path: str | Path) -> Strategy:
        """Read a TOML file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as exc:
            raise StrategyError(f"cannot read strategy file {path}: {exc.strerror}.") from exc
        except UnicodeDecodeError as exc:
            raise SyntaxProblem(f"strategy file {path} is not UTF-8 text.") from exc
        except ValueError as exc:  # a path that no file system takes
            raise StrategyError(f"cannot read strategy file {one_line(repr(path), 60)}: {exc}.") from exc
        try:
            return cls.from_toml(text)
        except StrategyError as exc:
            raise type(exc)(f"{path}: {exc}") from exc

    @classmethod
    def _assemble(cls, methods: Mapping[str, Method]) -> Strategy:
        """Axes that were left off get the partners of the synchronization, then the general defaults."""
        when = cast(Synchronization, methods.get("synchronization", cls.synchronization))
        # The registries guarantee the types; __post_init__ checks them again.
        return cls(**cast(dict[str, Any], {**methods, **_partners(when, methods)}))

    def __str__(self) -> str:
        return self._parts().text()

    def to_toml(self) -> str:
        """The complete TOML table: every setting, defaults included."""
        lines: list[str] = []
        for axis in AXES:
            method = getattr(self, axis)
            layers = list(method.layers()) if isinstance(method, Compressor) else [method]
            base, wrappers = layers[-1], layers[-2::-1]
            lines.append(f"[strategy.{axis}]\nname = {write_value(base.name)}")
            lines += [f"{key} = {write_value(value)}" for key, value in base.settings().items()]
            for wrapper in wrappers:
                lines.append(f"[[strategy.{axis}.with]]\nname = {write_value(wrapper.name)}")
                lines += [f"{key} = {write_value(value)}" for key, value in wrapper.settings().items()]
            lines.append("")
        return "\n".join(lines)

    @cached_property
    def codec(self) -> Compressor:
        """The compressor over the whole training, including that of the first steps, or of the sums between hosts."""
        when = self.synchronization
        if (between := self.architecture.between_by) is not None:
            return TwoLevels(self.compression, sums=cast(Compressor, _from_value("compression", between)))
        if not when.beginning and not when.moments:
            return self.compression
        first = cast(Compressor, _from_value("compression", when.beginning or "none"))
        return _AsTheRuleSays(self.compression, first=first, rule=when)

    def codecs(self) -> tuple[Compressor, ...]:
        """Every compressor in use: that of gradients, of weights, and of sums between hosts."""
        sums = self.codec.between_hosts
        return (self.compression, self.weights_codec, *(() if sums is None else (sums,)))

    @cached_property
    def weights_codec(self) -> Compressor:
        """The compressor of weights, where each rank holds a shard of them."""
        return cast(Compressor, _from_value("compression", self.architecture.weights_by))

    def planned(self, total_steps: int) -> Strategy:
        """The same strategy with the number of optimizer steps of training."""
        self.compression.check_length(total_steps)
        return dataclasses.replace(self, synchronization=self.synchronization.planned(total_steps))

    def plan(
        self,
        tensors: Sequence[TensorSpec],
        world_size: int = 1,
        *,
        observed: bool = True,
        timing: Timing | None = None,
        candidate: int = 0,
    ) -> Plan:
        """How `tensors` that are exchanged at one time are grouped and ordered; see Schedule.plan."""
        plan = self.scheduling.plan(tensors, observed=observed, timing=timing, candidate=candidate)
        return self._cut(plan, world_size)

    def exchange_line(
        self, tensors: Sequence[TensorSpec], world_size: int, startup_s: float, byte_s: float
    ) -> tuple[float, float]:
        """The a and b of t(M) = a + b M for M bytes of gradients, sent compressed, from those of plain all-reduces.

        Every wait has a start-up. How much less is sent follows from formulas, for all tensors together.
        """
        codec, whom, moment = self.codec, self.architecture, Moment.steady(world_size)
        buckets = [bucket for bucket in one_bucket_per_kind(tensors) if bucket.nbytes]
        if world_size == 1 or codec.traits.lossless or not buckets:
            return startup_s, byte_s
        sent, plain = (
            sum(whom.sent_bytes(bucket, method, moment) for bucket in buckets) for method in (codec, NoCompression())
        )
        num_waits = max(codec.num_waits(bucket, moment) for bucket in buckets)
        return num_waits * startup_s, byte_s * sent / plain

    def lasting_plan(self, tensors: Sequence[TensorSpec], world_size: int) -> Plan | None:
        """The plan of the whole training where any pass may leave parameters out."""
        plan = self.scheduling.lasting_plan(tensors)
        return None if plan is None else self._cut(plan, world_size)

    def _cut(self, plan: Plan, world_size: int) -> Plan:
        # Only gradients that are summed: parameters, which rounds exchange or servers hold, must stay whole.
        shapes = self.codec.traits.needs_whole_tensors
        return self.architecture.cut(plan, world_size, tensors=self.exchanges_gradients() and not shapes)

    def plans(self, tensors: Sequence[TensorSpec], world_size: int) -> list[Plan]:
        """One plan for each fragment of the model."""
        return [self.plan(part, world_size) for part in self.synchronization.parts(tensors)]

    def init(self, bucket: Bucket) -> BucketState:
        """The state of `bucket` before the first step, except for fields that depend on parameter values."""
        state = self.architecture.init(NoCompression() if bucket.moment else self.compression, bucket)
        if not self.mixes_parameters() and not bucket.moment:
            self.synchronization.init(state)
        return state

    def mixes_parameters(self) -> bool:
        """Whether neighbours mix their parameters directly, and the synchronization only says when."""
        return self.architecture.scope == "neighbours" and not self.synchronization.among_neighbours

    def resize(self) -> dict[str, Resize]:
        """How each field of state is converted when the number of workers changes."""
        found: dict[str, Resize] = {}
        for layer in self.compression.layers():
            found |= layer.on_resize
        if self.architecture.adds_differences:
            # Neighbours change then, and both ranks of a pair must have the same state.
            found = dict.fromkeys(found, "reset")
        rule = self.synchronization
        when = {} if self.mixes_parameters() else {**rule.remembered(), **rule.whole_fields}
        return {**found, **when, **self.architecture.fields}

    def scale_equivariant(self) -> bool:
        """Whether twice the gradients give twice the result, as a GradScaler requires."""
        return self.synchronization.scale_equivariant and self.codec.traits.scale_equivariant

    def scaled_fields(self) -> frozenset[str]:
        """The fields of state that are in the unit of the gradients, which a GradScaler may change."""
        return self.synchronization.scaled_fields.union(*(layer.scaled_fields for layer in self.compression.layers()))

    def owed_fields(self) -> frozenset[str]:
        """The fields of state that hold gradients or changes still to be sent, which another strategy can take over."""
        return self.synchronization.owed_fields.union(*(layer.owed_fields for layer in self.compression.layers()))

    def wire_bytes_per_step(self, tensors: Iterable[TensorSpec], world_size: int) -> int:
        """Payload bytes one worker sends per optimizer step, from formulas alone."""
        moment = Moment.steady(world_size)
        return sum(self.plan_bytes_per_step(plan, moment) for plan in self.plans(list(tensors), world_size))

    def wire_bytes_per_round(self, tensors: Iterable[TensorSpec], world_size: int) -> int:
        """Payload bytes one worker sends when everything is exchanged once, however many steps come before."""
        moment = Moment.steady(world_size)
        return sum(self.plan_bytes(plan, moment) for plan in self.plans(list(tensors), world_size))

    def state_bytes(self, tensors: Iterable[TensorSpec]) -> int:
        """Bytes of state that one worker keeps between steps: residuals, anchors, momenta; without the servers' state.

        They are in addition to model, gradients and optimizer.
        """
        if self.compression.traits.by_name:
            return sum(self._remembered(tensor).nbytes for tensor in tensors)
        # Large models have many tensors of few shapes.
        alike: dict[tuple[object, ...], list[TensorSpec]] = {}
        for tensor in tensors:
            alike.setdefault((tensor.shape, tensor.dtype, tensor.moment), []).append(tensor)
        return sum(len(group) * self._remembered(group[0]).nbytes for group in alike.values())

    def per_element(self, tensor: TensorSpec) -> frozenset[str]:
        """Fields of a tensor's state that hold a value for each of its elements."""
        return self._remembered(tensor).per_element()

    def _remembered(self, tensor: TensorSpec) -> BucketState:
        """The state of a tensor, without its values."""
        bucket = Bucket((dataclasses.replace(tensor, device=torch.device("meta")),))
        state = self.init(bucket)
        self.architecture.begin(state, torch.empty(bucket.numel, dtype=tensor.dtype, device="meta"))
        return state

    def plan_bytes_per_step(self, plan: Plan, moment: Moment) -> int:
        """Payload bytes one worker sends per optimizer step under a given plan."""
        rule, sent = self.synchronization, 0.0
        for kept in ("", *rule.moments):
            buckets = tuple(bucket for bucket in plan.buckets if bucket.moment == kept)
            part = dataclasses.replace(plan, buckets=buckets, weights=() if kept else plan.weights)
            sent += self.plan_bytes(part, moment) * rule.rounds_per_step(kept)
        return round(sent)

    def plan_bytes(self, plan: Plan, moment: Moment) -> int:
        """Payload bytes one worker sends when all buckets of a plan are exchanged once."""
        when, whom = self.synchronization, self.architecture
        if moment.world_size == 1 and not (whom.has_servers and when.acts_alone):
            return 0
        price = whom.decoupled_bytes if plan.decoupled else whom.sent_bytes
        if not when.barrier and not whom.has_servers:
            price = whom.pairwise_bytes
        codec, weights = self.codec, self.weights_codec
        gathered = _of_each(
            plan.weights,
            weights,
            lambda bucket: bucket.tensors[0].gathers * whom.gathered_bytes(bucket, weights, moment),
        )
        return _of_each(plan.buckets, codec, lambda bucket: price(bucket, codec, moment)) + gathered

    def exchanges_gradients(self) -> bool:
        """Whether gradients (or momenta) are averaged over all ranks in every step; False: parameters are exchanged."""
        when, whom = self.synchronization, self.architecture
        return when.quantity != "change" and when.barrier and whom.scope == "everyone"

    def results_add_up(self) -> bool:
        """Whether the result of an exchange is a mean of gradients, to which those of another pass may be added.

        False: it is a momentum, a velocity or a direction.
        """
        when, traits = self.synchronization, self.codec.traits
        return when.quantity == "gradient" and when.keeps_scale and traits.keeps_scale and not traits.accumulates

    def adds_to_momentum(self, step: int) -> bool:
        """Whether each exchange of this step adds a mean of gradients to a momentum or a velocity."""
        when = self.synchronization
        averaged = when.quantity == "momentum" and step >= when.warmup
        return averaged or not when.keeps_scale or self.codec.traits.accumulates

    def exact(self) -> bool:
        """Whether predicted bytes are exact; False: bytes depend on values or on the speed of workers."""
        when = self.synchronization
        return self.codec.traits.exact_bytes and not when.lazy and (when.barrier or self.architecture.has_servers)

    def cannot_combine(self) -> list[str]:
        """Wrappers that would be refused on top of this strategy, with the reason."""
        return cannot_combine(self._parts(), [method for method in COMPRESSORS if issubclass(method, Wrapper)])


@dataclass(frozen=True, kw_only=True)
class _AsTheRuleSays(ByStep):
    """The strategy's compressor; in some steps, or for moments, the one of the synchronization."""

    name: ClassVar[str] = "by_step"
    rule: Synchronization

    def is_first(self, bucket: Bucket, moment: Moment) -> bool:
        return bool(bucket.moment) or self.rule.begins(moment.step)


def _of_each(buckets: Sequence[Bucket], codec: Compressor, price: Callable[[Bucket], int]) -> int:
    """The sum of `price` over all buckets, computed once for equal ones, of which large models have many."""
    if codec.traits.by_name:
        return sum(map(price, buckets))
    alike: dict[object, list[Bucket]] = {}
    for bucket in buckets:
        alike.setdefault((bucket.layout, bucket.tensors[0].gathers), []).append(bucket)
    return sum(len(group) * price(group[0]) for group in alike.values())


def _not_a_strategy(name: str) -> UnknownName:
    """Why a single name is no strategy; a method of another axis is shown in its place, and in presets."""
    for position, (axis, registry) in enumerate(AXES.items()):
        if name in registry and not issubclass(registry.lookup(name), Wrapper):
            usual = Strategy()
            text = " / ".join([*(str(getattr(usual, before)) for before in list(AXES)[:position]), name])
            presets = [preset for preset, (written, _) in PRESETS.items() if re.search(rf"\b{name}\b", written)]
            beside = f", or take a preset that has it: {', '.join(presets)}" if presets else ""
            return UnknownName(f'strategy: "{name}" is a method of {axis}. Write "{text}"{beside}.')
    return unknown_strategy(name, PRESETS, SYNCHRONIZATIONS.names())


def as_strategy(strategy: Strategy | str) -> Strategy:
    """A Strategy from text or from itself."""
    return strategy if isinstance(strategy, Strategy) else Strategy.parse(strategy)


def _partners(when: Synchronization, given: Mapping[str, Method]) -> dict[str, Method]:
    """The methods that a synchronization declares for the axes that were left off."""
    others = [axis for axis in AXES if axis != when.axis]
    for axis in when.partners:
        if axis not in others:
            raise MethodError(f'{when.name}.partners names "{axis}"; it may name {", ".join(others)}.')
    return {axis: _from_value(axis, text) for axis, text in when.partners.items() if axis not in given}


def _from_value(axis: str, value: object) -> Method:
    """An axis of a TOML table: text, or a table with name, settings and `with`."""
    if isinstance(value, str):
        axes = parse_text(value)
        if len(axes) != 1:
            raise SyntaxProblem(f'strategy TOML: {axis} = "{one_line(value, 60)}" must be one method, not several.')
        return _from_calls(axis, axes[0])
    name, settings, wrappers = read_method(axis, value)
    method = _base(axis, name, settings)
    for wrapper in wrappers:
        if isinstance(wrapper, str):
            axes = parse_text(wrapper)
            if len(axes) != 1 or len(axes[0]) != 1:
                raise SyntaxProblem(f'strategy TOML: {axis}.with holds "{one_line(wrapper, 60)}"; write one wrapper.')
            method = _wrap(axis, axes[0][0].name, _named(axis, axes[0][0]), method)
        else:
            inner_name, inner_settings, nested = read_method(f"{axis}.with", wrapper)
            if nested:
                raise SyntaxProblem(f"strategy TOML: {axis}.with cannot be nested; list wrappers side by side.")
            method = _wrap(axis, inner_name, inner_settings, method)
    return method


def _from_calls(axis: str, calls: list[Call]) -> Method:
    """An axis of strategy text: a base method and its wrappers."""
    method = _base(axis, calls[0].name, _named(axis, calls[0]))
    for call in calls[1:]:
        method = _wrap(axis, call.name, _named(axis, call), method)
    return method


def _named(axis: str, call: Call) -> dict[str, object]:
    """The arguments of a call by name; a value without a name goes to the next setting in order of declaration."""
    declared = list(AXES[axis].lookup(call.name).declared())
    named: dict[str, object] = {}
    for position, (key, value) in enumerate(call.arguments):
        if key is None:
            if position >= len(declared):
                raise InvalidSetting(
                    f'{axis}.{call.name} takes {len(declared)} setting(s), "{one_line(value, 40)}" is one too many. '
                    f"Known: {', '.join(declared) or 'none'}."
                )
            key = declared[position]
        if key in named:
            raise InvalidSetting(f"{axis}.{call.name}.{key} is set twice.")
        named[key] = value
    return named


def _resolved(axis: str, method: type[Method], settings: Mapping[str, object]) -> dict[str, object]:
    """The settings with those that name a method looked up."""
    declared = method.declared()
    return {
        key: _as_setting(axis, value, f"{axis}.{method.name}.{key}")
        if key in declared and declared[key].kind == "method"
        else (str(value) if isinstance(value, Call) else value)
        for key, value in settings.items()
    }


def _as_setting(axis: str, value: object, where: str) -> object:
    """The method a setting names: as a call, as text or as a table."""
    if isinstance(value, str):
        axes = parse_text(value)
        if len(axes) != 1 or len(axes[0]) != 1:
            raise SyntaxProblem(f'{where} = "{one_line(value, 60)}" must be one method by itself.')
        value = axes[0][0]
    if isinstance(value, Call):
        name, settings = value.name, _named(axis, value)
    elif isinstance(value, Mapping):
        name, settings, wrappers = read_method(where, value)
        if wrappers:
            raise SyntaxProblem(f'{where} must be one method by itself, without "with".')
    else:
        return value  # an object, or something that is refused where the setting is read
    method = AXES[axis].lookup(name)
    if issubclass(method, Wrapper):
        raise SyntaxProblem(f"{where}: {name} wraps another method and cannot stand by itself.")
    return method.build(_resolved(axis, method, settings))


def _base(axis: str, name: str, settings: Mapping[str, object]) -> Method:
    method = AXES[axis].lookup(name)
    if issubclass(method, Wrapper):
        raise SyntaxProblem(
            f'{axis}: {name} wraps another method. Write "fp16 + {name}", with the method it wraps before the +.'
        )
    return method.build(_resolved(axis, method, settings))


def _wrap(axis: str, name: str, settings: Mapping[str, object], inner: Method) -> Method:
    method = AXES[axis].lookup(name)
    if not issubclass(method, Wrapper):
        wrappers = [known.name for known in AXES[axis] if issubclass(known, Wrapper)]
        raise SyntaxProblem(
            f"{axis}: {name} cannot follow a +, it is not a wrapper. Known wrappers: {', '.join(wrappers) or 'none'}."
        )
    return method.build(_resolved(axis, method, settings), inner=inner)
