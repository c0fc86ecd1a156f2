"""The state that a joining rank receives from one that trains: all that replicas have in common.

These are parameters, module buffers, optimizer states, the state of methods that is equal on all ranks (anchors, outer
momenta), and objects of the training script. Residuals start at zero.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from laconic.core.stateful import ParameterState
from laconic.core.transport import Transport
from laconic.errors import AttachError, one_line
from laconic.runtime.agreement import broadcast_all, first_difference
from laconic.runtime.elastic.settings import Carried
from laconic.runtime.hooks.contract import TrainingHooks
from laconic.runtime.hooks.rounds import PENDING
from laconic.runtime.job import Job
from laconic.runtime.optimizer_state import broadcast_optimizer_state, layout_of
from laconic.runtime.progress import Position
from laconic.runtime.shards import as_piece_of, is_sharded, local, place_of

_WHAT = "the state of training"


class Facts(NamedTuple):
    """The progress of training."""

    unit: int
    step: int
    position: Position
    speeds: dict[str, int]
    """The speeds by which samples are divided."""
    loss_scale: float
    """The loss scale in whose unit gradients are kept; 1: there is no GradScaler."""


def share_state(
    transport: Transport, job: Job, hooks: TrainingHooks, facts: Facts, carried: Sequence[Carried]
) -> Facts:
    """Rank 0 of `transport` sends, all others receive; every rank of it calls this."""
    gives = transport.rank == 0
    about = _about(job)
    state = _in_common(job, hooks) if gives else {}
    values: list[torch.Tensor] = []
    header: dict[str, Any] = {}
    if gives:
        forms = {name: {field: _form(value) for field, value in fields.items()} for name, fields in state.items()}
        objects = [_taken_apart(one.state_dict(), values, type(one).__name__) for one in carried]
        tensors = [_form(value) for value in values]
        header = {"about": about, "facts": facts, "state": forms, "objects": objects, "tensors": tensors}
    header = _broadcast_json(transport, header)
    if not gives:
        found = first_difference(header["about"], about)
        if found is not None:
            key, theirs, mine = found
            raise AttachError(
                f"this worker joins with another {key}: {one_line(mine, 80)}, the others have {one_line(theirs, 80)}. "
                "Build the same model and strategy in every process."
            )
        if len(header["objects"]) != len(carried):
            raise AttachError(
                f"this worker carries {len(carried)} objects, the others {len(header['objects'])}. Give attach the "
                "same elastic.carry in every process."
            )
        device = next(iter(job.parameters.values())).device
        state = {
            name: {field: _empty(form, device) for field, form in fields.items()}
            for name, fields in header["state"].items()
        }
        values = [_empty(form, device) for form in header["tensors"]]
    with torch.no_grad():
        model = [*job.model.parameters(), *job.model.buffers()]
        remembered = [value for fields in state.values() for value in fields.values()]
        for work in broadcast_all(transport, [*model, *remembered, *values], purpose="control", what=_WHAT):
            work.wait()
        for work in broadcast_optimizer_state(transport, job.optimizers, job.parameters):
            work.wait()
        # The sender may close its end when all have received everything.
        rows = torch.zeros((transport.world_size, 1))
        transport.all_gather(rows, torch.ones(1), purpose="control", what=_WHAT).wait()
        if gives:
            return facts
        unit, step, position, speeds, loss_scale = header["facts"]
        hooks.load(state, [], step)
    for one, parts in zip(carried, header["objects"], strict=True):
        one.load_state_dict(_put_together(parts, values, one.state_dict(), type(one).__name__))
    return Facts(unit, step, (position[0], position[1]), speeds, loss_scale)


def _about(job: Job) -> dict[str, str]:
    """The properties that must be the same in every process."""
    described = {"strategy": str(job.strategy), "model class": type(job.model).__name__}
    tensors = [*job.model.named_parameters(), *job.model.named_buffers()]
    described |= {name: f"{tuple(t.shape)} {t.dtype} trained={t.requires_grad} {place_of(t)}" for name, t in tensors}
    described |= {"optimizers": ", ".join(type(one).__name__ for one in job.optimizers)}
    return described | {"division into parameter groups": layout_of(job.optimizers, job.parameters)}


def _in_common(job: Job, hooks: TrainingHooks) -> ParameterState:
    """The state of methods that is equal on all ranks, and results that have arrived and are not applied yet."""
    kinds = job.strategy.resize()
    return {
        name: {
            field: value.contiguous()
            for field, value in fields.items()
            if field == PENDING or kinds.get(field.partition("|")[0]) == "copy"
        }
        for name, fields in hooks.state().items()
    }


def _form(value: torch.Tensor) -> list[Any]:
    return [str(value.dtype).removeprefix("torch."), list(value.shape), value.device.type]


def _empty(form: Sequence[Any], device: torch.device) -> torch.Tensor:
    kind, shape, where = form
    return torch.empty(shape, dtype=getattr(torch, kind), device=device if where == device.type else where)


def _broadcast_json(transport: Transport, record: Mapping[str, Any]) -> dict[str, Any]:
    text = json.dumps(record).encode() if transport.rank == 0 else b""
    size = torch.tensor([len(text)], dtype=torch.int64)
    transport.broadcast(size, purpose="control", what=_WHAT).wait()
    packed = torch.zeros(int(size.item()), dtype=torch.uint8)
    if text:
        packed.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    transport.broadcast(packed, purpose="control", what=_WHAT).wait()
    return json.loads(bytes(packed.tolist()))


def _taken_apart(value: Any, tensors: list[torch.Tensor], owner: str) -> Any:
    """A state as JSON, with tensors put into a list of their own."""
    if isinstance(value, torch.Tensor):
        tensors.append(local(value).detach())
        return {"tensor": len(tensors) - 1, "sharded": is_sharded(value)}
    if isinstance(value, Mapping):
        return {"pairs": [[_taken_apart(part, tensors, owner) for part in pair] for pair in value.items()]}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_taken_apart(part, tensors, owner) for part in value]}
    if isinstance(value, bool | int | float | str | None):
        return value
    raise AttachError(
        f"elastic.carry: the state of {owner} holds a {type(value).__name__}, which cannot be sent to a rank that "
        "joins. It may hold numbers, texts, tensors, and lists and dictionaries of them."
    )


def _put_together(value: Any, tensors: Sequence[torch.Tensor], own: Any, owner: str) -> Any:
    """The inverse of `_taken_apart`; `own`: this rank's state, whose sharded tensors say how theirs are sharded."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        received = tensors[value["tensor"]]
        if not value["sharded"]:
            return received
        if not is_sharded(own) or local(own).shape != received.shape:
            raise AttachError(
                f"elastic.carry: the state of {owner} holds a sharded tensor that has no counterpart on this worker, "
                "which joins. Build the object from the sharded model before attach()."
            )
        return as_piece_of(own, received)
    if "pairs" in value:
        theirs = {_put_together(k, tensors, None, owner): v for k, v in value["pairs"]}
        mine = own if isinstance(own, Mapping) else {}
        return {key: _put_together(part, tensors, mine.get(key), owner) for key, part in theirs.items()}
    kind, parts = next(iter(value.items()))
    known = own if isinstance(own, list | tuple) and len(own) == len(parts) else [None] * len(parts)
    made = [_put_together(part, tensors, mine, owner) for part, mine in zip(parts, known, strict=True)]
    return tuple(made) if kind == "tuple" else made
