"""Parameters of which this rank holds a piece: DTensors, as FSDP2 (fully_shard) and tensor parallelism make them.

A model is sharded inside a group of ranks, and laconic averages between such groups: rank i of one group with rank i of
the others, each its own shard. Exchanges, state and updates concern the local shard; .grad and the optimizer's state
stay DTensors. Plain tensors pass through unchanged, and `torch.distributed.tensor` is never imported: if the script has
not imported it, there are no DTensors.

The shard is looked up at every use: FSDP replaces its tensor when it starts and when it loads a state.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from laconic.core.stateful import ParameterState
from laconic.core.tensor import TensorSpec, outermost_dimension
from laconic.errors import AttachError, CheckpointError
from laconic.strategy import Strategy

_ISLANDS = (
    'Shard with fully_shard(..., mesh=mesh["shard"]) of a 2-D mesh and attach with process_group=mesh["replicate"]'
)


OUTERMOST = "the model"
"""The name of the part that fully_shard() was called with last."""


def is_sharded(tensor: object) -> bool:
    """Whether it is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of a DTensor; a plain tensor itself."""
    return tensor._local_tensor if is_sharded(tensor) else tensor  # pyrefly: ignore[missing-attribute]


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The shard of a parameter's gradient that belongs to the parameter's local shard."""
    gradient = parameter.grad
    if gradient is None or not is_sharded(gradient):
        return gradient
    placements = parameter.placements  # pyrefly: ignore[missing-attribute]
    if gradient.placements != placements:  # pyrefly: ignore[missing-attribute]
        # Tensor parallelism: every rank holds a partial sum.
        gradient = gradient.redistribute(placements=placements)  # pyrefly: ignore[missing-attribute]
    return local(gradient)


def as_piece_of(whole: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A DTensor like `whole` with these local values; a plain tensor if `whole` is one."""
    if not is_sharded(whole):
        return values
    return sys.modules["torch.distributed.tensor"].DTensor.from_local(
        values,
        whole.device_mesh,  # pyrefly: ignore[missing-attribute]
        whole.placements,  # pyrefly: ignore[missing-attribute]
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


class Pieces(Mapping[str, torch.Tensor]):
    """The local shards of parameters."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters

    def __getitem__(self, name: str) -> torch.Tensor:
        return local(self._parameters[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def num_holders_of(tensor: torch.Tensor) -> int:
    """The number of ranks over which a tensor is sharded or replicated as a DTensor; 1 for a plain tensor."""
    return tensor.device_mesh.size() if is_sharded(tensor) else 1  # pyrefly: ignore[missing-attribute]


def place_of(tensor: torch.Tensor) -> str:
    """Which shard of the tensor is local, in words; empty for a plain tensor."""
    if not is_sharded(tensor):
        return ""
    mesh: Any = tensor.device_mesh  # pyrefly: ignore[missing-attribute]
    placements: Any = tensor.placements  # pyrefly: ignore[missing-attribute]
    return f"{tuple(tensor.shape)} as {placements} at {mesh.get_coordinate()} of {tuple(mesh.shape)}"


def offsets_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The indices in the whole tensor of the first element of this rank's piece of a DTensor."""
    # A module of PyTorch's own, which torch.distributed.checkpoint takes the places of pieces from.
    _, offsets = sys.modules["torch.distributed.tensor._utils"].compute_local_shape_and_global_offset(
        tensor.shape,
        tensor.device_mesh,  # pyrefly: ignore[missing-attribute]
        tensor.placements,  # pyrefly: ignore[missing-attribute]
    )
    return offsets


def shard_key(tensor: torch.Tensor) -> str:
    """The suffix that distinguishes this rank's shard in a saved state; empty for a plain tensor."""
    if not is_sharded(tensor):
        return ""
    mesh: Any = tensor.device_mesh  # pyrefly: ignore[missing-attribute]
    return "shard " + ",".join(map(str, mesh.get_coordinate()))


def as_saved(
    state: ParameterState, parameters: Mapping[str, torch.Tensor], per_element: Callable[[str], Collection[str]]
) -> ParameterState:
    """The state of shards in a form in which the ranks of a shard group do not overwrite each other.

    A field with a value for every element becomes sharded as its parameter is, so that it can be loaded onto other
    shards; the name of any other field gets its coordinates on the mesh.

    per_element: the names of the fields with a value for every element, by parameter.
    """
    saved: ParameterState = {}
    for name, fields in state.items():
        whole = parameters[name]
        if not is_sharded(whole):
            saved[name] = fields
            continue
        shared = per_element(name)
        saved[name] = {
            key if key in shared else f"{key}|{shard_key(whole)}": as_piece_of(whole, value) if key in shared else value
            for key, value in fields.items()
        }
    return saved


def as_attached(state: ParameterState, parameters: Mapping[str, torch.Tensor]) -> ParameterState:
    """The inverse of `as_saved`."""
    found: ParameterState = {}
    for name, fields in state.items():
        if name not in parameters or not is_sharded(parameters[name]):
            found[name] = dict(fields)
            continue
        whole, mine = parameters[name], f"|{shard_key(parameters[name])}"
        found[name] = {}
        for key, value in fields.items():
            if is_sharded(value) and place_of(value) != place_of(whole):
                raise CheckpointError(
                    f"the checkpoint holds {key} of parameter {name} as {place_of(value)}, this model has "
                    f"{place_of(whole)}. Load it with torch.distributed.checkpoint, into what session.state_dict() "
                    "gives now."
                )
            found[name][key.removesuffix(mine)] = local(value)
    return found


def check_made_after_sharding(optimizers: Sequence[Optimizer], parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise if an optimizer holds parameters that sharding has replaced."""
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    ids = {id(parameter) for parameter in held}
    known = {id(parameter) for parameter in parameters.values()}
    replaced = {tuple(p.shape) for p in held if not is_sharded(p) and id(p) not in known}
    for name, parameter in parameters.items():
        if is_sharded(parameter) and id(parameter) not in ids and tuple(parameter.shape) in replaced:
            raise AttachError(
                f'parameter "{name}" is sharded, and the optimizer still holds the whole tensor that sharding has '
                "replaced, so it would not train the model. Make the optimizer after fully_shard() or "
                "parallelize_module(), then attach."
            )


def specs_of(model: nn.Module, parameters: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    """The spec of each parameter's local shard; for FSDP, with the part whose gradients become ready together."""
    together = _fsdp_groups(model) if any(map(is_sharded, parameters.values())) else {}
    return {
        name: TensorSpec(
            name,
            tuple(local(parameter).shape),
            parameter.dtype,
            local(parameter).device,
            whole_bytes=_whole_bytes(parameter),
            ready_with=together.get(id(parameter), ""),
            outermost=outermost_dimension(local(parameter)),
        )
        for name, parameter in parameters.items()
    }


def whole_specs_of(parameters: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    """The specs of whole parameters, which are the same on every rank; those of sharded ones say so."""
    return [
        replace(TensorSpec.of(name, parameter), whole_bytes=_whole_bytes(parameter))
        for name, parameter in parameters.items()
    ]


def _whole_bytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.dtype.itemsize if is_sharded(parameter) else 0


def plain_name(name: str) -> str:
    """The name of a parameter or module without the prefix of torch.compile()."""
    return name.replace("_orig_mod.", "")


def part_name(path: str) -> str:
    """The name of a part that fully_shard() was called with, from the path of its module."""
    return plain_name(f"{path}.").removesuffix(".") or OUTERMOST


def reshard(model: nn.Module) -> None:
    """Reshard FSDP's parameters: after an evaluation those of the outermost module are still unsharded."""
    for _, module in fsdp_modules(model):
        module.reshard()


def fsdp_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """The parts of a model that fully_shard() was called with."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return [] if kind is None else [(name, part) for name, part in model.named_modules() if isinstance(part, kind)]


def _fsdp_groups(model: nn.Module) -> dict[int, str]:
    """Id of a parameter -> the innermost part that fully_shard() was called with: a part's gradients come at once."""
    found: dict[int, str] = {}
    for path, module in fsdp_modules(model):  # outer modules first, so that inner ones win
        found |= {id(parameter): part_name(path) for parameter in module.parameters()}
    return found


def check_shards(
    model: nn.Module, parameters: Mapping[str, torch.Tensor], strategy: Strategy, ranks: list[int] | None
) -> None:
    """Raise unless these ranks hold the same shard of every parameter and the strategy can work on shards.

    ranks: None for a transport that is not torch.distributed's.
    """
    if strategy.architecture.holds_shards:
        _check_owners(model, strategy, ranks)
        return
    # Frozen parameters and buffers too: all are made equal to rank 0's at the start.
    everything = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    pieces = {name: tensor for name, tensor in everything.items() if is_sharded(tensor)}
    if not pieces:
        return
    first = next(iter(pieces))
    if ranks is None:
        raise AttachError(f'parameter "{first}" is a DTensor, and those need torch.distributed: leave transport out.')
    for name, tensor in pieces.items():
        mesh: Any = tensor.device_mesh  # pyrefly: ignore[missing-attribute]
        others: list[int] = mesh.mesh.flatten().tolist()
        shared = sorted(set(others) & set(ranks) - {dist.get_rank()})
        if shared:
            raise AttachError(
                f'parameter "{name}" lies on the mesh of ranks {listed(sorted(others))}, and process_group has rank '
                f"{listed(shared)} of them besides this one: they would average different shards, or average "
                f"twice. {_ISLANDS}."
            )
        if mesh.device_type != "cpu" and local(tensor).device.type == "cpu":
            raise AttachError(
                f'parameter "{name}" is offloaded to the CPU (CPUOffloadPolicy): its gradient may still be in flight '
                "when it is read. Shard without offload_policy."
            )
    plain = [name for name, parameter in parameters.items() if not is_sharded(parameter)]
    if plain and fsdp_modules(model):
        raise AttachError(
            f'parameter "{plain[0]}" is in no module that fully_shard() was called on, while "{first}" is: its '
            "gradients differ inside a group of shards and would not be averaged. Call fully_shard() on the whole "
            "model, without ignored_params."
        )
    _check_strategy(first, strategy)


def _check_owners(model: nn.Module, strategy: Strategy, ranks: list[int] | None) -> None:
    """Raise unless fully_shard() has sharded the whole model over exactly these ranks."""
    how, parameters = strategy.architecture.name, dict(model.named_parameters())
    usage = 'Call fully_shard() on its blocks and on the whole, and attach with process_group=mesh["shard"]'
    if ranks is None:
        raise AttachError(f'"{how}" needs torch.distributed: leave transport out.')
    if not fsdp_modules(model):
        raise AttachError(
            f'"{how}" compresses what fully_shard() sends, and this model is not sharded. {usage}; or use "all_reduce".'
        )
    for name, parameter in parameters.items():
        if not is_sharded(parameter):
            raise AttachError(f'parameter "{name}" is in no module that fully_shard() was called on. {usage}.')
        mesh: Any = parameter.device_mesh  # pyrefly: ignore[missing-attribute]
        owners: list[int] = mesh.mesh.flatten().tolist()
        # In this order: rank r of the group is to own shard r.
        if mesh.ndim != 1 or dist.get_process_group_ranks(mesh.get_group()) != ranks:
            raise AttachError(
                f'parameter "{name}" is sharded over ranks {listed(owners)}, but process_group has ranks '
                f'{listed(ranks)}: "{how}" needs the ranks of one shard group, in the same order. Shard over one '
                'dimension, fully_shard(..., mesh=mesh["shard"]), and attach with process_group=mesh["shard"].'
            )
        (placement,) = parameter.placements  # pyrefly: ignore[missing-attribute]
        if not placement.is_shard(0):
            raise AttachError(
                f'parameter "{name}" is sharded as {placement}; "{how}" supports only shards of the first dimension. '
                "Leave shard_placement_fn out."
            )
        if mesh.device_type != "cpu" and local(parameter).device.type == "cpu":
            raise AttachError(f'parameter "{name}" is offloaded to the CPU. Shard without offload_policy.')


def _check_strategy(name: str, strategy: Strategy) -> None:
    rule = strategy.synchronization
    problem = ""
    if strategy.scheduling.defers:
        problem = f'"{strategy.scheduling.name}" updates layers after FSDP has gathered them. Use "fusion"'
    elif strategy.architecture.has_servers or not rule.barrier:
        problem = f'"{rule.name} / {strategy.architecture.name}" holds whole parameters. Use "all_reduce" or "gossip"'
        if not rule.barrier:
            problem += ' with "bsp" or "diloco"'
    elif rule.needs_adam:
        problem = f'"{rule.name}" changes the optimizer\'s momentum. Use "bsp", "demo" or "diloco"'
    if problem:
        raise AttachError(f'parameter "{name}" is sharded (a DTensor), and {problem}.')


def listed(ranks: list[int]) -> str:
    """Ranks as text."""
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)} in all)"
