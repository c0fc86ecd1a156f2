"""Session state as plain containers and tensors, keyed by parameter name.

    {"format": 1, "strategy": text, "world_size": n, "step": s, "order": [parameter, ...],
     "resize": {"<method>.<field>": "sum" | "copy" | "reset"},
     "ranks": {"<rank>": {"<parameter>": {"<method>.<field>": tensor}}}}

"resize" says what becomes of a field when the number of workers changes (core/stateful.py), so that a state can be
rearranged without the methods that wrote it.

What a rank remembers is its own, so it stands under its rank: torch.save keeps one file per rank, and
torch.distributed.checkpoint, which stores equal keys only once, keeps all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from laconic.core.stateful import ParameterState, Resize
from laconic.errors import CheckpointError, one_line

FORMAT = 1


def pack(
    strategy: str,
    world_size: int,
    step: int,
    order: list[str],
    resize: Mapping[str, Resize],
    *,
    rank: int,
    state: ParameterState,
) -> dict[str, Any]:
    """The state of one rank."""
    return {
        "format": FORMAT,
        "strategy": strategy,
        "world_size": world_size,
        "step": step,
        "order": order,
        "resize": dict(resize),
        "ranks": {str(rank): state},
    }


def unpack(
    saved: Mapping[str, Any],
    strategy: str,
    names: Collection[str],
    *,
    world_size: int,
    rank: int,
    expected: ParameterState,
) -> tuple[int, list[str], ParameterState]:
    """Step, order of gradients and state of this rank; raises if the checkpoint belongs to something else."""
    _check_form(saved)
    if saved["strategy"] != strategy:
        raise CheckpointError(
            f'the checkpoint was written by "{one_line(saved["strategy"], 100)}", this session runs "{strategy}". '
            "Attach with the saved strategy, or start without loading the session state."
        )
    if saved["world_size"] != world_size:
        raise CheckpointError(
            f"the checkpoint was written by {saved['world_size']} workers, this session has {world_size}. "
            "Pass every rank's state through laconic.runtime.redistribute(states, world_size) first."
        )
    state = saved["ranks"].get(str(rank))
    if state is None:
        raise CheckpointError(
            f"the checkpoint holds the state of rank {', '.join(saved['ranks']) or 'none'}, this is rank {rank}. "
            "Save and load one session state per rank."
        )
    for name, fields in expected.items():
        for field, tensor in fields.items():
            found = state.get(name, {}).get(field)
            if found is None and saved.get("resize", {}).get(_kind(field)) == "reset":
                continue  # redistribute() has taken it out
            if found is None or tuple(found.shape) != tuple(tensor.shape):
                shape = "nothing" if found is None else tuple(found.shape)
                raise CheckpointError(
                    f"the checkpoint holds {shape} for {field} of parameter {name}, this model needs "
                    f"{tuple(tensor.shape)}. Load a checkpoint of the same model."
                )
    unknown = [name for name in state if name not in names]
    if unknown:
        raise CheckpointError(f"the checkpoint holds state of parameter {unknown[0]}, which this model does not have.")
    order = list(saved["order"])
    if order and sorted(order) != sorted(names):
        raise CheckpointError(
            f"the checkpoint orders {len(order)} parameters, this model trains {len(names)} or others. Load a "
            "checkpoint of the same model."
        )
    return int(saved["step"]), order, state


def redistribute(states: Sequence[Mapping[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """The states of all old ranks, rearranged for another number of workers.

    What counts in a residual or a velocity is the sum over all ranks. A rank that goes away hands its part to one that
    stays (old rank r to new rank r mod n, added up); a new rank starts without: nothing owed is lost or sent twice.
    What all ranks have in common is copied, and what is worth nothing elsewhere starts anew.
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
    missing = [rank for rank in range(int(first["world_size"])) if rank not in by_rank]
    if missing:
        raise CheckpointError(f"redistribute needs the state of every old rank; rank {missing[0]} is missing.")
    resize: Mapping[str, Resize] = first.get("resize", {})
    merged = [_start(by_rank[0], resize) for _ in range(world_size)]
    for rank, state in sorted(by_rank.items()):
        for name, fields in state.items():
            for field, tensor in fields.items():
                if resize.get(_kind(field), "sum") == "sum":
                    total = merged[rank % world_size][name][field]
                    total += tensor.to(total.device)
    common = (first["strategy"], world_size, first["step"], list(first["order"]), resize)
    return [pack(*common, rank=rank, state=state) for rank, state in enumerate(merged)]


def _start(state: ParameterState, resize: Mapping[str, Resize]) -> ParameterState:
    """What a new rank has before sums are formed, made after an old rank's state."""
    return {
        name: {
            field: tensor.clone() if resize.get(_kind(field)) == "copy" else torch.zeros_like(tensor)
            for field, tensor in fields.items()
            if resize.get(_kind(field)) != "reset"
        }
        for name, fields in state.items()
    }


def _kind(field: str) -> str:
    """A field without what follows a bar: the neighbour it is about, or the number of its dimensions."""
    return field.partition("|")[0]


def _check_form(saved: Mapping[str, Any]) -> None:
    keys = {"format", "strategy", "world_size", "step", "order", "ranks"}
    if not isinstance(saved, Mapping) or not keys <= set(saved):
        raise CheckpointError(f"this is not a laconic session state: it must have the keys {', '.join(sorted(keys))}.")
    if saved["format"] != FORMAT:
        raise CheckpointError(
            f"session state format {saved['format']} is not known here; this laconic writes {FORMAT}."
        )
