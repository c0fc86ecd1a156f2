"""State and settings of optimizers: compared between ranks, and made equal.

Replicas stay equal only if momenta and learning rates are equal too. Of the state, tensors and plain values (numbers,
texts, None) and lists, tuples and dictionaries of them are compared and sent; other objects cannot be sent, which
raises. Of the settings, other objects, such as functions, stay as they are on each rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from laconic.core.exchange import Exchange
from laconic.core.transport import Transport
from laconic.errors import AttachError, one_line
from laconic.runtime.agreement import broadcast_all, differing, first_difference
from laconic.runtime.digest import digests
from laconic.runtime.shards import as_piece_of, local

_Plain = bool | int | float | str | None
Optimizers = Sequence[Optimizer]
Parameters = Mapping[str, nn.Parameter]


def check_optimizer_state(transport: Transport, optimizers: Optimizers, parameters: Parameters) -> None:
    """Raise on every rank unless settings and state of the optimizers are the same everywhere."""
    descriptions = differing(transport, _describe(optimizers, parameters))
    for rank, other in enumerate(descriptions):
        found = first_difference(descriptions[0], other)
        if found is not None:
            key, here, there = found
            raise AttachError(
                f"the optimizer is not the same on all ranks: {key} is {one_line(here, 60)} on rank 0 and "
                f"{one_line(there, 60)} on rank {rank}, so replicas would drift apart. Attach with sync_optimizer=True "
                "to take over rank 0's, or load the same optimizer state on every rank."
            )


def broadcast_optimizer_state(
    transport: Transport, optimizers: Optimizers, parameters: Parameters, *, source: int = 0
) -> Exchange:
    """Make settings and state of the optimizers those of rank `source`."""
    device = transport.control_device
    said: dict[str, Any] = {}
    if transport.rank == source:
        problem = _unsendable(optimizers, parameters)
        said = {"problem": problem} if problem else {"plan": _plan(optimizers, parameters)}
    text = json.dumps(said).encode() if said else b""
    size = torch.tensor([len(text)], dtype=torch.int64, device=device)
    yield transport.broadcast(size, source=source, purpose="control", what="the size of the optimizer's state")
    packed = torch.zeros(int(size.item()), dtype=torch.uint8, device=device)
    if text:
        packed.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    yield transport.broadcast(packed, source=source, purpose="control", what="the fields of the optimizer's state")
    said = json.loads(bytes(packed.tolist()))
    if "problem" in said:
        raise AttachError(said["problem"])
    if transport.rank != source:
        _rebuild(said["plan"], optimizers, parameters)
    tensors = [value for _, value in _entries(optimizers, parameters) if isinstance(value, torch.Tensor)]
    yield from broadcast_all(transport, tensors, purpose="control", what="the optimizer's state", source=source)


def settings_of(optimizers: Optimizers) -> list[str]:
    """The plain values and the numbers in tensors among the settings of the optimizers, in words."""
    found = [entry for number in range(len(optimizers)) for entry in _settings(optimizers, number)]
    return [
        f"{key} = {value.item() if isinstance(value, torch.Tensor) else value!r}"
        for key, value in found
        if not isinstance(value, torch.Tensor) or value.numel() == 1
    ]


def _settings(optimizers: Optimizers, number: int) -> Iterator[tuple[str, Any]]:
    of = _of(optimizers, number)
    for index, group in enumerate(optimizers[number].param_groups):
        for key in sorted(group):
            if key != "params" and _comparable(group[key]):
                yield f"{key} in parameter group {index}{of}", group[key]


def _of(optimizers: Optimizers, number: int) -> str:
    return f" of optimizer {number}" if len(optimizers) > 1 else ""


def _entries(optimizers: Optimizers, parameters: Parameters) -> Iterator[tuple[str, Any]]:
    """Everything that can be compared, in words, in the same order on all ranks."""
    for number, optimizer in enumerate(optimizers):
        of = _of(optimizers, number)
        yield from _settings(optimizers, number)
        for name, parameter in parameters.items():
            for key, value in _sorted(optimizer.state.get(parameter, {})):
                yield from _leaves(str(key), f" of parameter {name}{of}", value)
        for name in _names(optimizer):
            yield from _leaves(name, f" in the state{of}", _state(optimizer)[name])


def _sorted(fields: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    return sorted(fields.items(), key=lambda item: str(item[0]))


def _names(optimizer: Optimizer) -> list[str]:
    """The state that belongs to no parameter, but has a name."""
    return sorted(key for key in _state(optimizer) if isinstance(key, str))


def _state(optimizer: Optimizer) -> dict[Any, Any]:
    """The state by parameter and, with some optimizers, by name."""
    return optimizer.state


def _leaves(place: str, of: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The tensors and plain values in a state, each with its place in words; other objects are left out."""
    if isinstance(value, Mapping):
        for key, part in _sorted(value):
            yield from _leaves(f"{place}[{key!r}]", of, part)
    elif _comparable(value):
        yield place + of, local(value) if isinstance(value, torch.Tensor) else value
    elif isinstance(value, tuple | list):
        for index, part in enumerate(value):
            yield from _leaves(f"{place}[{index}]", of, part)


def _comparable(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.layout == torch.strided
    return isinstance(value, _Plain) or (isinstance(value, tuple | list) and all(map(_comparable_plain, value)))


def _comparable_plain(value: object) -> bool:
    return isinstance(value, _Plain)


def _sendable(value: object) -> bool:
    """Whether a state consists of tensors and plain values, however nested."""
    if isinstance(value, Mapping):
        return all(isinstance(key, _Plain) and _sendable(part) for key, part in value.items())
    return _comparable(value) or (isinstance(value, tuple | list) and all(map(_sendable, value)))


def _describe(optimizers: Optimizers, parameters: Parameters) -> dict[str, str]:
    entries = list(_entries(optimizers, parameters))
    tensors = [value for _, value in entries if isinstance(value, torch.Tensor)]
    found = iter(digests(tensors))
    described: dict[str, str] = {}
    for key, value in entries:
        if isinstance(value, torch.Tensor):
            digest = f"{tuple(value.shape)} {value.dtype} with digest {next(found) % 2**64:016x}"
            described[key] = repr(value.item()) if value.numel() == 1 else digest
        else:
            described[key] = repr(value)
    return described


def layout_of(optimizers: Optimizers, parameters: Parameters) -> str:
    """The parameters of each group of each optimizer, by name."""
    names = {parameter: name for name, parameter in parameters.items()}
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    return " | ".join(", ".join(names.get(one, "frozen") for one in params) for params in groups)


def _plan(optimizers: Optimizers, parameters: Parameters) -> list[dict[str, Any]]:
    """Settings and state with a description in the place of every tensor."""
    return [
        {
            "groups": [
                {key: _form(value) for key, value in group.items() if key != "params" and _comparable(value)}
                for group in optimizer.param_groups
            ],
            "state": {
                name: _form(optimizer.state[parameter])
                for name, parameter in parameters.items()
                if parameter in optimizer.state
            },
            "named": {name: _form(_state(optimizer)[name]) for name in _names(optimizer)},
        }
        for optimizer in optimizers
    ]


def _unsendable(optimizers: Optimizers, parameters: Parameters) -> str:
    """What an optimizer keeps that other ranks cannot take over, in words; empty: nothing."""
    for optimizer in optimizers:
        states = {f"the state of parameter {name}": optimizer.state.get(one, {}) for name, one in parameters.items()}
        states |= {"its state": {name: _state(optimizer)[name] for name in _names(optimizer)}}
        for where, fields in states.items():
            for key, value in fields.items():
                if not _sendable(value):
                    return (
                        f'{type(optimizer).__name__} keeps a {type(value).__name__} in {where}, as "{key}", which '
                        "other ranks cannot take over. They take over numbers, texts, dense tensors, and lists and "
                        "dictionaries of them."
                    )
    return ""


def _form(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {"pairs": [[key, _form(part)] for key, part in value.items()]}
    if isinstance(value, tuple | list) and not _comparable(value):
        return {"parts": [_form(part) for part in value], "tuple": isinstance(value, tuple)}
    if not isinstance(value, torch.Tensor):
        return {"value": value, "tuple": isinstance(value, tuple)}
    value = local(value)
    kind = str(value.dtype).removeprefix("torch.")
    return {"tensor": kind, "shape": list(value.shape), "stride": list(value.stride()), "on": value.device.type}


def _rebuild(plan: list[dict[str, Any]], optimizers: Optimizers, parameters: Parameters) -> None:
    for optimizer, theirs in zip(optimizers, plan, strict=True):
        for group, settings in zip(optimizer.param_groups, theirs["groups"], strict=True):
            for key, form in settings.items():
                group[key] = _value(form, group.get(key), group["params"][0] if group["params"] else None)
        for name, parameter in parameters.items():
            form = theirs["state"].get(name)
            if form is None:
                optimizer.state.pop(parameter, None)
            else:
                optimizer.state[parameter] = _value(form, optimizer.state[parameter], parameter)
        for name in _names(optimizer):
            if name not in theirs["named"]:
                del _state(optimizer)[name]
        for name, form in theirs["named"].items():
            _state(optimizer)[name] = _value(form, _state(optimizer).get(name), None)


def _value(form: dict[str, Any], mine: object, like: torch.Tensor | None) -> Any:
    """A plain value as it is; for the description of a tensor, an empty tensor to receive it."""
    if "pairs" in form:
        known = mine if isinstance(mine, dict) else {}
        made = {key: _value(part, known.get(key), like) for key, part in form["pairs"]}
        known.clear()
        known.update(made)  # the optimizer may hold on to its own dictionary
        return known
    if "parts" in form:
        parts = form["parts"]
        own = mine if isinstance(mine, tuple | list) and len(mine) == len(parts) else [None] * len(parts)
        found = [_value(part, one, like) for part, one in zip(parts, own, strict=True)]
        return tuple(found) if form["tuple"] else found
    if "tensor" not in form:
        return tuple(form["value"]) if form["tuple"] else form["value"]
    dtype: torch.dtype = getattr(torch, form["tensor"])
    if isinstance(mine, torch.Tensor) and mine.dtype == dtype and list(local(mine).shape) == form["shape"]:
        return mine
    device = torch.device("cpu") if form["on"] == "cpu" or like is None else like.device
    made_here = torch.empty_strided(form["shape"], form["stride"], dtype=dtype, device=device)
    # State of the parameter's shape is sharded like the parameter.
    return as_piece_of(like, made_here) if like is not None and local(like).shape == made_here.shape else made_here
