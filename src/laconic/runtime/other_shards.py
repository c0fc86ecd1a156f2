"""Agreement with the ranks that hold the other pieces of the same model: all of them attach or load, or none does.

A session between groups of shards communicates only with the ranks that hold the same piece. If one piece were trained
in another way than the rest, the model would be corrupted without an error, or the next collective of FSDP would wait
for a rank that has raised.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from laconic.errors import AttachError, CheckpointError, CommunicationError, one_line
from laconic.runtime.digest import unordered_digest
from laconic.runtime.shards import is_sharded, listed, local


@contextmanager
def attached_alike(parameters: Mapping[str, torch.Tensor], said: str, *, timeout_s: float) -> Iterator[None]:
    """Raise after the block unless the ranks with the other shards come through it too, with the same settings.

    Every rank of the meshes enters the block. A rank that cannot attach raises inside.

    said: the settings, as text.
    """
    number = int.from_bytes(hashlib.sha256(said.encode()).digest()[:7], "big")
    try:
        yield
    except AttachError:
        for _ in _least_of_all([0, number, -number], parameters, "attach()", timeout_s):
            pass
        raise
    for all_can, lowest, highest in _least_of_all([1, number, -number], parameters, "attach()", timeout_s):
        if not all_can:
            raise AttachError(
                "a rank that holds another piece of the model cannot attach. The error of that rank says why."
            )
        if lowest != -highest:
            name = next(name for name, parameter in parameters.items() if is_sharded(parameter))
            raise AttachError(
                f'ranks that hold other pieces of the model (of parameter "{name}", for example) attach with other '
                f"settings than rank {dist.get_rank()}, which has {said}. Give the same settings on every rank."
            )


def check_other_shards(parameters: Mapping[str, torch.Tensor], step: int, *, can_load: bool, timeout_s: float) -> None:
    """Raise unless the ranks with the other shards can load their states too, saved after the same number of steps.

    Every rank of the meshes calls it, also one that cannot load its state.
    """
    for all_can, lowest, highest in _least_of_all(
        [int(can_load), step, -step], parameters, "load_state_dict()", timeout_s
    ):
        if can_load and not all_can:
            raise CheckpointError(
                "a rank that holds another piece of the model cannot load its state. The error of that rank says why."
            )
        if can_load and lowest != -highest:
            raise CheckpointError(
                f"the checkpoint is inconsistent: shards of the model load states saved after {lowest} and after "
                f"{-highest} steps. Load states that were saved together."
            )


def whole_digests(parameters: Mapping[str, torch.Tensor], *, timeout_s: float) -> list[int]:
    """A checksum of each whole parameter, the same for any number of shards; every rank of the meshes calls it."""
    found = {name: unordered_digest(local(parameter)) for name, parameter in parameters.items()}
    for mesh in _meshes(parameters):
        here = [name for name, parameter in parameters.items() if getattr(parameter, "device_mesh", None) == mesh]
        # Of several equal copies on the mesh, one counts.
        sums = torch.stack([found[name] if _is_first_copy(parameters[name]) else found[name] * 0 for name in here])
        _reduce(sums, mesh, dist.ReduceOp.SUM, "a checksum of the model", timeout_s)
        found |= dict(zip(here, sums, strict=True))
    return [int(one) for one in found.values()]


def _is_first_copy(parameter: Any) -> bool:
    places = zip(parameter.placements, parameter.device_mesh.get_coordinate(), strict=True)
    return all(coordinate == 0 for placement, coordinate in places if placement.is_replicate())


def _least_of_all(
    numbers: list[int], parameters: Mapping[str, torch.Tensor], operation: str, timeout_s: float
) -> Iterator[list[int]]:
    """For each mesh of these parameters, the least of each number over the ranks of the mesh, which all call it."""
    for mesh in _meshes(parameters):
        least = torch.tensor(numbers, dtype=torch.int64, device=mesh.device_type)
        _reduce(least, mesh, dist.ReduceOp.MIN, operation, timeout_s)
        yield least.tolist()


def _meshes(parameters: Mapping[str, torch.Tensor]) -> list[Any]:
    found: list[Any] = []
    for parameter in parameters.values():
        mesh = getattr(parameter, "device_mesh", None) if is_sharded(parameter) else None
        if mesh is not None and mesh not in found:
            found.append(mesh)
    return found


def _reduce(values: torch.Tensor, mesh: Any, op: Any, operation: str, timeout_s: float) -> None:
    """Replace `values` by those of all ranks of the mesh together."""
    for dimension in range(mesh.ndim):
        group = mesh.get_group(dimension)
        work = dist.all_reduce(values, op=op, group=group, async_op=True)
        try:
            # With a timeout of our own: the mesh has that of the training script, often half an hour.
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as exc:
            ranks = listed(dist.get_process_group_ranks(group))
            raise CommunicationError(
                f"{operation} on rank {dist.get_rank()}: ranks {ranks}, which hold pieces of the same model, "
                f"did not all come within {timeout_s:g} s: {one_line(exc, 120)}."
            ) from exc
