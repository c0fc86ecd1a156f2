"""A parallel plan as data, and as text: "dp=16 tp=8 pp=4 zero=1 schedule=interleaved(3) sequence_parallel".

    GPUs = dp * tp * pp * cp,   ep divides dp * tp * cp

Ranks are numbered as in Megatron: tensor-parallel ranks are adjacent, then context, then data, and pipeline stages are
farthest apart. Experts are spread over consecutive ranks of one stage, each with whole experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Literal

from laconic.errors import ConfigurationError, did_you_mean, one_line
from laconic.workload.transformer import Transformer

Schedule = Literal["1f1b", "interleaved", "zero_bubble"]
Recompute = Literal["none", "selective", "full"]
_SCHEDULES = ("1f1b", "interleaved", "zero_bubble")
_RECOMPUTE = ("none", "selective", "full")
_MOST = 1 << 20
"""Of every degree, and of sequences in a micro-batch."""
_EXAMPLE = 'Write e.g. "dp=16 tp=8 pp=4 micro_batch=1 schedule=interleaved(3) recompute=selective sequence_parallel".'


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a model's training is divided among GPUs."""

    dp: int = 1
    """Replicas of the model, or shards of it with zero=3."""
    tp: int = 1
    """Ranks that share each matrix of a layer."""
    pp: int = 1
    """Stages of consecutive layers."""
    ep: int = 1
    """Ranks that share the experts of a layer."""
    cp: int = 1
    """Ranks that share each sequence."""
    zero: int = 0
    """1: optimizer state is sharded over dp; 2: gradients too; 3: parameters too, as with FSDP."""
    micro_batch: int = 1
    """Sequences that pass a stage together."""
    schedule: Schedule = "1f1b"
    interleave: int = 1
    """Groups of layers per stage; above 1 with schedule=interleaved(v) only."""
    recompute: Recompute = "none"
    """selective: the attention of each layer runs again in the backward pass; full: each whole layer does."""
    sequence_parallel: bool = False
    """Normalizations and residuals are split over the tensor-parallel ranks too."""

    def __post_init__(self) -> None:
        for key in ("dp", "tp", "pp", "ep", "cp", "micro_batch", "interleave"):
            if not 1 <= getattr(self, key) <= _MOST:
                bound = "at least 1" if getattr(self, key) < 1 else f"at most {_MOST}"
                raise ConfigurationError(f"plan: {key} must be {bound}, got {getattr(self, key)}.")
        if self.zero not in (0, 1, 2, 3):
            raise ConfigurationError(f"plan: zero must be 0, 1, 2 or 3, got {self.zero}.")
        if (self.interleave > 1) != (self.schedule == "interleaved"):
            raise ConfigurationError(
                "plan: schedule=interleaved needs the number of groups of layers per stage, at least 2: "
                "schedule=interleaved(2)."
            )
        if self.schedule != "1f1b" and self.pp == 1:
            raise ConfigurationError(
                f"plan: schedule={self.schedule} has no effect with pp=1. Leave it out, or give pp of at least 2."
            )
        if self.sequence_parallel and self.tp == 1:
            raise ConfigurationError("plan: sequence_parallel has no effect with tp=1. Leave it out.")
        if self.stage_gpus % self.ep:
            near = nearest_divisor(self.ep, self.stage_gpus)
            raise ConfigurationError(
                f"plan: ep={self.ep} must divide dp x tp x cp = {self.stage_gpus}. The nearest that does is ep={near}."
            )

    @property
    def gpus(self) -> int:
        """The number of GPUs that the plan needs."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def stage_gpus(self) -> int:
        """The number of GPUs of one pipeline stage."""
        return self.dp * self.tp * self.cp

    @property
    def gathers_layers(self) -> bool:
        """Whether each layer's parameters are gathered for every micro-batch and released again.

        With zero=3 they are, unless there are pipeline stages: they are then gathered once per step and kept, because a
        stage needs all its layers again for the next micro-batch.
        """
        return self.zero == 3 and self.pp == 1

    def num_micro_batches(self, global_batch: int) -> int:
        """Micro-batches that each replica passes through its stages in one step."""
        share = self.dp * self.micro_batch
        if global_batch % share:
            near = max(1, round(global_batch / share)) * share
            raise ConfigurationError(
                f"plan: a batch of {global_batch} sequences is not divisible by dp x micro_batch = {share}. "
                f"The nearest batch that is divisible has {near}."
            )
        return global_batch // share

    def check(self, model: Transformer, *, gpus: int | None = None, sequence: int | None = None) -> None:
        """Raise where the plan does not fit the model or the number of GPUs, naming the nearest legal choice."""
        if gpus is not None and self.gpus != gpus:
            self._refuse_gpus(gpus)
        heads, experts = model.num_attention_heads, model.num_experts
        if heads % self.tp:
            near = nearest_divisor(self.tp, heads)
            raise ConfigurationError(
                f"plan: {heads} heads are not divisible by tp={self.tp}. The nearest that divides them is tp={near}."
            )
        layers = model.num_hidden_layers
        if self.pp * self.interleave > layers:
            largest = layers // self.interleave
            # With pp=1 there are no groups.
            hint = (
                f"The largest pp is {largest}." if largest > 1 else f"With pp=2 there are at most {layers // 2} groups."
            )
            raise ConfigurationError(
                f"plan: pp={self.pp} with {self.interleave} groups per stage needs {self.pp * self.interleave} layers, "
                f"but {model.name or 'the model'} has {layers}. {hint}"
            )
        if self.ep > 1 and not experts:
            raise ConfigurationError(f"plan: ep={self.ep}, but {model.name or 'the model'} has no experts. Give ep=1.")
        if experts and experts % self.ep:
            near = nearest_divisor(self.ep, experts)
            raise ConfigurationError(
                f"plan: {experts} experts are not divisible by ep={self.ep}. The nearest that "
                f"divides them is ep={near}."
            )
        if sequence is not None and sequence % (self.cp * self.tp if self.sequence_parallel else self.cp):
            self._refuse_sequence(sequence)

    def _refuse_sequence(self, sequence: int) -> None:
        each, words = (self.tp, f" x tp={self.tp}") if self.sequence_parallel else (1, "")
        if sequence % each:
            near = max(1, round(sequence / each)) * each
            hint = f"With sequence_parallel, tp must divide them; the nearest length that is divisible is {near}."
        else:
            hint = f"The nearest cp that divides them is {nearest_divisor(self.cp, sequence // each)}."
        raise ConfigurationError(
            f"plan: sequences of {sequence} tokens are not divisible by cp={self.cp}{words}. {hint}"
        )

    def _refuse_gpus(self, gpus: int) -> None:
        others = self.tp * self.pp * self.cp
        if gpus % others == 0:
            hint = f"With dp={gpus // others} it does."
        else:
            near = max(others, round(gpus / others) * others)
            hint = (
                f"tp x pp x cp = {others} does not divide {gpus}; the nearest number of GPUs that it divides is {near}."
            )
        raise ConfigurationError(
            f"plan: dp x tp x pp x cp = {self.gpus} does not equal the number of GPUs, {gpus}. {hint}"
        )

    def __str__(self) -> str:
        words = [f"{key}={getattr(self, key)}" for key in ("dp", "tp", "pp", "ep", "cp") if getattr(self, key) > 1]
        words += [f"zero={self.zero}"] if self.zero else []
        words += [f"micro_batch={self.micro_batch}"]
        if self.schedule != "1f1b":
            words.append(
                f"schedule={self.schedule}" + (f"({self.interleave})" if self.schedule == "interleaved" else "")
            )
        words += [f"recompute={self.recompute}"] if self.recompute != "none" else []
        words += ["sequence_parallel"] if self.sequence_parallel else []
        return " ".join(words)


def nearest_divisor(wanted: int, number: int) -> int:
    """The divisor of `number` that is nearest to `wanted`, the smaller of two."""
    if wanted >= number:
        return number
    # Outwards: both numbers may be large, but 1 is no farther away than `wanted`.
    near = ((wanted - distance, wanted + distance) for distance in range(wanted))
    return next(n for pair in near for n in pair if number % n == 0)


def parse_plan(text: str) -> Plan:
    """The plan that `text` describes: key=value and flags, in any order, separated by spaces."""
    known = [field.name for field in fields(Plan) if field.name != "interleave"]
    found = Plan()
    values: dict[str, object] = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        if key not in known:
            raise ConfigurationError(
                f'plan: there is no setting "{one_line(key, 40)}". {did_you_mean(key, known)} {_EXAMPLE}'
            )
        if key in values:
            raise ConfigurationError(f"plan: {key} is given twice.")
        if key == "sequence_parallel":
            if equals and value not in ("true", "false"):
                raise ConfigurationError(f'plan: sequence_parallel must be true or false, got "{one_line(value, 40)}".')
            values[key] = value != "false"
        elif key == "schedule":
            values["schedule"], values["interleave"] = _schedule(value)
        elif key == "recompute":
            values[key] = _word(key, value, _RECOMPUTE)
        else:
            values[key] = _whole(key, value)
    return replace(found, **values)  # pyrefly: ignore


def _schedule(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"(\w+)(?:\((\d{1,4})\))?", text)
    name = _word("schedule", match[1] if match else text, _SCHEDULES)
    groups = match[2] if match else None
    if groups is not None and name != "interleaved":
        raise ConfigurationError(f"plan: schedule={name} takes no number. Write schedule=interleaved({groups}).")
    return name, int(groups) if groups else 1


def _word(key: str, value: str, allowed: Iterable[str]) -> str:
    if value not in allowed:
        raise ConfigurationError(f'plan: {key} cannot be "{one_line(value, 40)}". {did_you_mean(value, allowed)}')
    return value


def _whole(key: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", value):
        raise ConfigurationError(f'plan: {key} must be a whole number, got "{one_line(value, 40)}". {_EXAMPLE}')
    return int(value)
