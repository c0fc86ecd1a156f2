"""Session state as plain containers and tensors, keyed by parameter name.

    {"format": 3, "strategy": text, "world_size": n, "step": s, "order": [parameter, ...],
     "epoch": that of session.batches(), "samples": the number of its samples that have been used,
     "same_step": whether all ranks are in that step, "loss_scaled": whether a GradScaler was in use,
     "resize": {"<method>.<field>": "sum" | "copy" | "reset"},
     "digest": {"<rank>": tensor with one number per parameter},
     "ranks": {"<rank>": {"<parameter>": {"<method>.<field>": tensor}}}}

"resize" says how a field is converted when the number of workers changes (core/stateful.py), so that a state can be
rearranged without the methods that wrote it. A field with one value per element of a sharded parameter is a DTensor
like that parameter; other fields have "|shard <coordinates on the mesh>" at the end of their name. "digest" is a
checksum of the model's parameters on that rank, so that a state is not loaded with another model or with another rank's
replica; that of a sharded model does not depend on the number of shards.

State differs between ranks, so it is stored under the rank: torch.save writes one file per rank, and
torch.distributed.checkpoint, which stores equal keys only once, keeps the state of every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch

from laconic.core.stateful import ParameterState, Resize
from laconic.errors import CheckpointError, one_line
from laconic.runtime.progress import Position

FORMAT = 3
_LARGEST = 2**53
"""A larger number of steps, epochs or samples than any training has."""


def pack(
    strategy: str,
    world_size: int,
    step: int,
    order: list[str],
    resize: Mapping[str, Resize],
    *,
    rank: int,
    state: ParameterState,
    digest: Mapping[str, torch.Tensor],
    same_step: bool,
    loss_scaled: bool,
    position: Position,
) -> dict[str, Any]:
    """The state of one rank."""
    return {
        "format": FORMAT,
        "strategy": strategy,
        "world_size": world_size,
        "step": step,
        "same_step": same_step,
        "loss_scaled": loss_scaled,
        "epoch": position[0],
        "samples": position[1],
        "order": order,
        "resize": dict(resize),
        "digest": dict(digest),
        "ranks": {str(rank): state},
    }


@dataclass
class Report:
    """What one rank has read from its saved state, and the problems found in it."""

    step: int = 0
    position: Position = (0, 0)
    order: list[str] = field(default_factory=list)
    state: ParameterState = field(default_factory=dict)
    unfit: str = ""
    """Why the state cannot be loaded by this session, if it cannot."""
    other_model: str = ""
    """Why it does not belong to the current model, if it does not."""

    def summary(self) -> dict[str, str]:
        """The fields that are exchanged with other ranks."""
        order = hashlib.sha256("\n".join(self.order).encode()).hexdigest()
        return {"unfit": self.unfit, "other_model": self.other_model, "saved_step": str(self.step), "order": order}


def read(
    saved: Mapping[str, Any],
    taken_apart: Callable[[ParameterState], ParameterState],
    strategy: str,
    names: Sequence[str],
    *,
    world_size: int,
    rank: int,
    expected: ParameterState,
    kinds: Collection[str] | None,
    digest: torch.Tensor,
    replicas_differ: bool,
) -> Report:
    """Read the saved state of this rank and report its problems.

    taken_apart: the saved whole tensors as this rank's pieces. expected: fields that this session needs. kinds: other
    fields that it knows; None if it cannot tell. digest: of the model's current parameters.
    """
    report = Report()
    try:
        _check_form(saved)
        _check_origin(saved, strategy, world_size, rank)
        report.step, report.order = saved["step"], list(saved["order"])
        report.position = (saved["epoch"], saved["samples"])
        report.state = taken_apart(saved["ranks"][str(rank)])
        _check_state(report.state, names, expected, kinds, saved["resize"])
        if report.order and sorted(report.order) != sorted(names):
            raise CheckpointError(
                f"the {len(report.order)} parameters in the checkpoint are not the {len(names)} that this model "
                "trains. Load a checkpoint of the same model."
            )
        then = saved["digest"].get(str(rank))
        if then is None and saved["digest"]:
            raise CheckpointError(f'the checkpoint has no "digest" of rank {rank}. {_ONE_PER_RANK}')
        if then is not None and then.shape != digest.shape:
            raise CheckpointError(
                f'the checkpoint has a "digest" of {len(then)} parameters, this model trains {len(digest)}. Load a '
                "checkpoint of the same model."
            )
    except CheckpointError as error:
        report.unfit = str(error)
        return report
    if then is not None:
        report.other_model = _other_model(names, then.tolist(), digest.tolist(), rank, replicas_differ)
    return report


_ONE_PER_RANK = "Save and load one session state per rank."


def _other_model(names: Sequence[str], then: list[int], now: list[int], rank: int, replicas_differ: bool) -> str:
    """A message if the model is not the one that the state was saved with; empty if it is."""
    changed = [name for name, before, after in zip(names, then, now, strict=True) if before != after]
    if not changed:
        return ""
    advice = "Load the model before the session, and save it after session.state_dict()"
    if replicas_differ:
        advice += (
            ". Replicas differ under this strategy: save and load the model on every rank, not rank 0's on all, or "
            "call session.average() before you save both"
        )
    return (
        f'the model on rank {rank} is not the one this session state was saved with: "{changed[0]}" and '
        f"{len(changed) - 1} other parameters have other values. {advice}."
    )


def compare(said: Sequence[Mapping[str, str]], own: Report, *, rank: int, same_step: bool) -> None:
    """Raise on every rank unless all can load their states and these were saved together.

    said: what each rank has reported. same_step: ranks are in the same step whenever a state is saved.
    """
    _raise_first([row["unfit"] for row in said], own.unfit)
    first = said[0]
    for other, row in enumerate(said):
        if same_step and row["saved_step"] != first["saved_step"]:
            raise CheckpointError(
                f"the checkpoint is inconsistent: rank 0 loads a state saved after {first['saved_step']} steps, rank "
                f"{other} one saved after {row['saved_step']}. Load states that were saved together."
            )
        if row["order"] != first["order"]:
            raise CheckpointError(
                f"the states of rank 0 and rank {other} were not saved together: they have gradients in a different "
                "order. Load states that were saved together."
            )
    _raise_first([row["other_model"] for row in said], own.other_model)


def _raise_first(problems: Sequence[str], own: str) -> None:
    """Raise this rank's problem or, if it has none, that of another one."""
    if own:
        raise CheckpointError(own)
    for rank, problem in enumerate(problems):
        if problem:
            raise CheckpointError(f"rank {rank} cannot load its state: {problem}")


def _check_origin(saved: Mapping[str, Any], strategy: str, world_size: int, rank: int) -> None:
    if saved["strategy"] != strategy:
        raise CheckpointError(
            f'the checkpoint was written by "{one_line(saved["strategy"], 100)}", this session runs "{strategy}". '
            "Attach with the saved strategy, or start without loading the session state."
        )
    if saved["world_size"] != world_size:
        raise CheckpointError(
            f"the checkpoint was written by {saved['world_size']} workers, this session has {world_size}. "
            "Pass every rank's state through laconic.redistribute(states, world_size) first."
        )
    if str(rank) not in saved["ranks"]:
        raise CheckpointError(
            f"the checkpoint holds the state of rank {', '.join(saved['ranks']) or 'none'}, this is rank {rank}. "
            f"{_ONE_PER_RANK}"
        )


def _check_state(
    state: ParameterState,
    names: Collection[str],
    expected: ParameterState,
    kinds: Collection[str] | None,
    resize: Mapping[str, Resize],
) -> None:
    """Raise unless the state has exactly the required fields, with the required shapes and dtypes."""
    for name, fields in expected.items():
        for key, tensor in fields.items():
            found = state.get(name, {}).get(key)
            if found is None and resize.get(_kind(key)) == "reset":
                continue  # redistribute() has taken it out
            if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
                what = "nothing" if found is None else f"{tuple(found.shape)} {found.dtype}"
                raise CheckpointError(
                    f"the checkpoint holds {what} for {key} of parameter {name}, this model needs "
                    f"{tuple(tensor.shape)} {tensor.dtype}. Load a checkpoint of the same model."
                )
    for name, fields in state.items():
        if name not in names:
            raise CheckpointError(f"the checkpoint holds state of parameter {name}, which this model does not have.")
        for key in fields:
            if kinds is not None and _kind(key) not in kinds and key not in expected.get(name, {}):
                raise CheckpointError(
                    f"the checkpoint holds {one_line(key, 80)} of parameter {name}, which this strategy does not know."
                )


def redistribute(states: Sequence[Mapping[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """The states of all old ranks, rearranged for another number of workers.

    Only the sum over all ranks matters for a residual or a velocity. The values of old rank r are added to those of new
    rank r mod n, and a new rank starts from zero, so nothing is lost or sent twice. State that all ranks have in common
    is copied, and state that is valid only on its own rank starts from zero.
    """
    if not states:
        raise CheckpointError("redistribute needs the state of every old rank, got none.")
    if world_size < 1:
        raise CheckpointError(f"world_size must be >= 1, got {world_size}.")
    by_rank: dict[int, ParameterState] = {}
    for saved in states:
        _check_form(saved)
        by_rank |= {int(rank): state for rank, state in saved["ranks"].items()}
    first = states[0]
    alike = ("strategy", "world_size", *(("step", "epoch", "samples") if first["same_step"] else ()))
    for saved in states:
        for key in alike:
            if saved[key] != first[key]:
                raise CheckpointError(
                    f"the states were not saved together: {key} is {one_line(first[key], 80)} in the first and "
                    f"{one_line(saved[key], 80)} in that of rank {', '.join(saved['ranks'])}."
                )
    missing = [rank for rank in range(int(first["world_size"])) if rank not in by_rank]
    if missing:
        raise CheckpointError(f"redistribute needs the state of every old rank; rank {missing[0]} is missing.")
    resize: Mapping[str, Resize] = first["resize"]
    merged = [
        share_of(by_rank[0], [state for old, state in sorted(by_rank.items()) if old % world_size == rank], resize)
        for rank in range(world_size)
    ]
    common = (first["strategy"], world_size, max(saved["step"] for saved in states), list(first["order"]), resize)
    facts = {"same_step": first["same_step"], "loss_scaled": first["loss_scaled"]}
    facts |= {"position": (first["epoch"], first["samples"])}
    # Without digests: a new rank may load the model of any old one.
    return [pack(*common, rank=rank, state=state, digest={}, **facts) for rank, state in enumerate(merged)]


def share_of(first: ParameterState, owed: Iterable[ParameterState], resize: Mapping[str, Resize]) -> ParameterState:
    """The state of a new rank: common state from old rank 0, and the sums of the residuals of some old ranks."""
    found: ParameterState = {
        name: {
            key: tensor.clone() if resize.get(_kind(key)) == "copy" else torch.zeros_like(tensor)
            for key, tensor in fields.items()
            if resize.get(_kind(key)) != "reset"
        }
        for name, fields in first.items()
    }
    for state in owed:
        for name, fields in state.items():
            for key, tensor in fields.items():
                if resize.get(_kind(key), "sum") == "sum":
                    total = found[name][key]
                    total += tensor.to(total.device)
    return found


def _kind(key: str) -> str:
    """The name of a field without the suffix after a bar, which is a neighbour or a number of dimensions."""
    return key.partition("|")[0]


def _check_form(saved: Mapping[str, Any]) -> None:
    """Raise unless an untrusted value has the form of a session state."""
    flags = {"same_step", "loss_scaled"}
    counts = {"step", "epoch", "samples"}
    keys = {"format", "strategy", "world_size", "order", "resize", "digest", "ranks", *counts, *flags}
    if not isinstance(saved, Mapping) or "format" not in saved:
        raise CheckpointError(f"this is not a laconic session state: it must have the keys {', '.join(sorted(keys))}.")
    if saved["format"] != FORMAT:
        raise CheckpointError(
            f"session state format {one_line(saved['format'], 40)} is not known here; this laconic writes {FORMAT}."
        )
    missing = sorted(keys - set(saved))
    if missing:
        raise CheckpointError(f"this is not a laconic session state: it has no {', '.join(missing)}.")
    _check(saved, "strategy", isinstance(saved["strategy"], str), "a text")
    _check(saved, "world_size", _is_count(saved["world_size"], at_least=1), "a number of workers")
    for count in sorted(counts):
        _check(saved, count, _is_count(saved[count], at_least=0), f"a whole number from 0 to {_LARGEST}")
    for flag in sorted(flags):
        _check(saved, flag, isinstance(saved[flag], bool), "true or false")
    order, resize = saved["order"], saved["resize"]
    _check(saved, "order", isinstance(order, list) and _all_texts(order), "a list of parameter names")
    known = isinstance(resize, Mapping) and _all_texts(resize) and set(resize.values()) <= set(get_args(Resize))
    _check(saved, "resize", known, f"fields with one of {', '.join(get_args(Resize))}")
    digest = saved["digest"]
    _check(saved, "digest", isinstance(digest, Mapping) and all(map(_is_digest, digest.values())), "int64 tensors")
    ranks = saved["ranks"]
    _check(saved, "ranks", isinstance(ranks, Mapping) and all(map(_is_rank, ranks)), "a dictionary keyed by rank")
    for rank, state in ranks.items():
        nested = isinstance(state, Mapping) and all(isinstance(fields, Mapping) for fields in state.values())
        if not nested or not _all_texts([*state, *(key for fields in state.values() for key in fields)]):
            raise CheckpointError(
                f"the state of rank {rank} in the checkpoint must be a dictionary keyed by parameter and field."
            )
        for name, fields in state.items():
            for key, value in fields.items():
                _check_tensor(value, f"{one_line(key, 80)} of parameter {one_line(name, 80)}")


def _check(saved: Mapping[str, Any], key: str, right: bool, wanted: str) -> None:
    if not right:
        raise CheckpointError(f'"{key}" in the checkpoint must be {wanted}, got {one_line(repr(saved[key]), 60)}.')


def _check_tensor(value: object, what: str) -> None:
    problem = ""
    if not isinstance(value, torch.Tensor):
        problem = f"a {type(value).__name__}"
    elif value.is_meta or value.layout != torch.strided:
        problem = "a tensor without values" if value.is_meta else f"a tensor of layout {value.layout}"
    elif value.is_complex():
        problem = "complex numbers"
    elif value.is_floating_point() and not bool(torch.isfinite(value).all()):
        raise CheckpointError(
            f"the checkpoint holds NaN or infinite values for {what}: training had gone wrong before it was saved. "
            "Load an earlier one."
        )
    if problem:
        raise CheckpointError(
            f"the checkpoint holds {problem} for {what}; it must be an ordinary tensor of real numbers."
        )


def _is_count(value: object, *, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and at_least <= value <= _LARGEST


def _is_rank(key: object) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdigit()


def _is_digest(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.dim() == 1 and not value.is_meta


def _all_texts(values: Collection[object]) -> bool:
    return all(isinstance(value, str) for value in values)
