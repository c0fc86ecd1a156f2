"""Agreement with the ranks that hold the other pieces of the same model: all of them attach or load, or none does.

A session between groups of shards communicates only with the ranks that hold the same piece. If one piece were trained
in another way than the rest, the model would be corrupted without an error, or the next collective of FSDP would wait
for a rank that has raised.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from laconic.errors import AttachError, CheckpointError, CommunicationError, one_line
from laconic.runtime.digest import as_numbers, digest, piece_digest
from laconic.runtime.shards import is_sharded, listed, local, offsets_of

SETTINGS = ("strategy", "init_sync", "sync_optimizer", "find_unused_parameters", "parameters", "optimizer settings")
"""The settings that are the same on the ranks of all shards."""
_LAST_VOTE_S = 5.0
"""How long a rank that has failed waits for the ranks with the other shards."""


class Attaching:
    """One call of attach(), about which the ranks with the other shards agree."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters
        self._meshes = _meshes(parameters)
        self._votes = [1, 1 + 2 * len(SETTINGS)] if self._meshes else []
        """How many numbers are exchanged in each vote to come."""

    def checked(self, *, timeout_s: float) -> None:
        """Raise unless the ranks with the other shards have passed the checks that need no communication, too."""
        if self._votes:
            votes, self._votes = self._votes[1:], []
            (all_can,) = _least_of_all([1], self._meshes, "attach()", timeout_s)
            _raise_unless(all_can)
            self._votes = votes

    def agree(self, said: Mapping[str, str], *, timeout_s: float) -> None:
        """Raise unless the ranks with the other shards come to this point too, with the same settings.

        said: SETTINGS, as text.
        """
        if not self._votes:
            return
        self._votes.clear()
        numbers = [int.from_bytes(hashlib.sha256(said[key].encode()).digest()[:7], "big") for key in SETTINGS]
        all_can, *rest = _least_of_all([1, *_both_ways(numbers)], self._meshes, "attach()", timeout_s)
        _raise_unless(all_can)
        for key, lowest, negative in zip(SETTINGS, rest[::2], rest[1::2], strict=True):
            if lowest != -negative:
                name = next(name for name, parameter in self._parameters.items() if is_sharded(parameter))
                raise AttachError(
                    f'ranks that hold other pieces of the model (of parameter "{name}", for example) attach with '
                    f"other settings than rank {dist.get_rank()}, which has {key} {one_line(said[key], 400)}. Give "
                    "the same settings on every rank."
                )

    def refuse(self) -> None:
        """Tell the ranks with the other shards that this rank cannot attach, unless they have agreed already."""
        if self._votes:
            _refuse(self._votes[0], self._meshes)
            self._votes.clear()


@contextmanager
def attached_alike(parameters: Mapping[str, torch.Tensor]) -> Iterator[Attaching]:
    """Inside, this rank attaches; if it fails before it has agreed, the ranks with the other shards raise too.

    Every rank of the meshes enters the block and either calls checked() and then agree(), or raises.

    parameters: all parameters, frozen ones included, so that all ranks know the same meshes.
    """
    attaching = Attaching(parameters)
    try:
        yield attaching
    except Exception:
        attaching.refuse()
        raise


def _raise_unless(all_can: int) -> None:
    if not all_can:
        raise AttachError(
            "a rank that holds another piece of the model cannot attach. The error of that rank says why."
        )


def refuse_load(parameters: Mapping[str, torch.Tensor]) -> None:
    """Tell the ranks with the other shards, which call `check_other_shards`, that this rank cannot load its state."""
    _refuse(3, _meshes(parameters))


def check_other_shards(parameters: Mapping[str, torch.Tensor], step: int, *, timeout_s: float) -> None:
    """Raise unless the ranks with the other shards can load their states too, saved after the same number of steps.

    Every rank of the meshes calls it, unless the rank cannot load its state: then it calls `refuse_load`.
    """
    meshes = _meshes(parameters)
    all_can, lowest, negative = _least_of_all([1, *_both_ways([step])], meshes, "load_state_dict()", timeout_s)
    if not all_can:
        raise CheckpointError(
            "a rank that holds another piece of the model cannot load its state. The error of that rank says why."
        )
    if lowest != -negative:
        raise CheckpointError(
            f"the checkpoint is inconsistent: shards of the model load states saved after {lowest} and after "
            f"{-negative} steps. Load states that were saved together."
        )


def whole_digests(parameters: Mapping[str, torch.Tensor], *, timeout_s: float) -> list[int]:
    """A checksum of each whole parameter, the same for any number of shards; every rank of the meshes calls it."""
    found = {name: _digest(parameter) for name, parameter in parameters.items()}
    for mesh in _meshes(parameters):
        here = [name for name, parameter in parameters.items() if getattr(parameter, "device_mesh", None) == mesh]
        # Of several equal copies on the mesh, one counts.
        sums = torch.stack([found[name] if _is_first_copy(parameters[name]) else found[name] * 0 for name in here])
        _reduce(sums, mesh, dist.ReduceOp.SUM, "a checksum of the model", timeout_s)
        found |= dict(zip(here, sums, strict=True))
    return as_numbers(list(found.values()))


def _digest(parameter: torch.Tensor) -> torch.Tensor:
    if not is_sharded(parameter):
        return digest(parameter)
    return piece_digest(local(parameter), parameter.shape, offsets_of(parameter))


def _is_first_copy(parameter: Any) -> bool:
    places = zip(parameter.placements, parameter.device_mesh.get_coordinate(), strict=True)
    return all(coordinate == 0 for placement, coordinate in places if placement.is_replicate())


def _both_ways(numbers: Iterable[int]) -> list[int]:
    """Each number and its negative: the minima of both show whether the numbers differ."""
    return [one for number in numbers for one in (number, -number)]


def _least_of_all(numbers: list[int], meshes: Iterable[Any], operation: str, timeout_s: float) -> list[int]:
    """The least of each number over the ranks of these meshes, which all call it.

    Nothing is judged between two meshes: a rank that raised there would be missing on the next one.
    """
    for mesh in meshes:
        least = torch.tensor(numbers, dtype=torch.int64, device=mesh.device_type)
        _reduce(least, mesh, dist.ReduceOp.MIN, operation, timeout_s)
        numbers = least.tolist()
    return numbers


def _refuse(count: int, meshes: Iterable[Any]) -> None:
    """Take part in `_least_of_all` with a first number of zero, but wait only a moment and raise nothing.

    The exchanges stay in flight: ranks that come later still learn of the refusal while this process lives.
    """
    deadline_s = time.monotonic() + _LAST_VOTE_S
    with suppress(RuntimeError, ValueError):
        works: list[Any] = []
        for mesh in meshes:
            for group in mesh.get_all_groups():
                zeros = torch.zeros(count, dtype=torch.int64, device=mesh.device_type)
                works.append(dist.all_reduce(zeros, op=dist.ReduceOp.MIN, group=group, async_op=True))
        for work in works:
            # A timeout of zero would be none.
            work.wait(timedelta(seconds=max(0.01, deadline_s - time.monotonic())))


def _meshes(parameters: Mapping[str, torch.Tensor]) -> list[Any]:
    found: list[Any] = []
    for parameter in parameters.values():
        mesh = getattr(parameter, "device_mesh", None) if is_sharded(parameter) else None
        if mesh is not None and mesh not in found:
            found.append(mesh)
    return found


def _reduce(values: torch.Tensor, mesh: Any, op: Any, operation: str, timeout_s: float) -> None:
    """Replace `values` by those of all ranks of the mesh together."""
    for group in mesh.get_all_groups():
        try:
            work = dist.all_reduce(values, op=op, group=group, async_op=True)
            # With a timeout of our own: the mesh has that of the training script, often half an hour.
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as exc:
            ranks = listed(dist.get_process_group_ranks(group))
            raise CommunicationError(
                f"{operation} on rank {dist.get_rank()}: ranks {ranks}, which hold pieces of the same model, "
                f"did not all come within {timeout_s:g} s: {one_line(exc, 120)}."
            ) from exc
