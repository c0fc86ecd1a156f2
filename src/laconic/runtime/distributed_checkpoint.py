"""Reads a session state that torch.distributed.checkpoint has saved, for any number of replicas and of shards.

The checkpoint itself names its ranks and their fields, so nothing depends on the state of the session that reads it:
exchanges that were in flight and ranks that no longer exist are found. Every rank reads independently and only what it
needs: its own state or, with another number of replicas, the states that it has to add up.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from laconic.core.stateful import ParameterState
from laconic.errors import CheckpointError, one_line
from laconic.runtime.checkpoint import share_of
from laconic.runtime.shards import as_piece_of, is_sharded, local, shard_key

_Path = tuple[Any, ...]


def read_checkpoint(
    folder: str | os.PathLike[str], key: str, parameters: Mapping[str, torch.Tensor], *, rank: int, world_size: int
) -> dict[str, Any]:
    """The state of one rank, as `checkpoint.pack` makes it.

    folder: the checkpoint_id that it was saved under. key: the key of the session state in the saved dictionary.
    """
    saved = _Saved(folder, key)
    head = saved.head()
    num_saved = head.get("world_size")
    if num_saved == world_size or not isinstance(num_saved, int):  # loading reports the problem
        return {**head, "digest": saved.digest(rank), "ranks": {str(rank): saved.state(rank, parameters)}}
    # As laconic.redistribute does: residuals of old ranks are added up, and common state is taken from the first.
    first = saved.state(0, parameters)
    owed = (first if old == 0 else saved.state(old, parameters) for old in range(rank, num_saved, world_size))
    return {**head, "world_size": world_size, "ranks": {str(rank): share_of(first, owed, head["resize"])}}


class _Saved:
    """The values stored in a folder under one key."""

    def __init__(self, folder: str | os.PathLike[str], key: str) -> None:
        from torch.distributed.checkpoint import FileSystemReader  # noqa: PLC0415 - a slow import that few need

        self._reader = FileSystemReader(folder)
        try:
            metadata = self._reader.read_metadata()
        except (OSError, RuntimeError, ValueError) as exc:
            raise CheckpointError(
                f'"{folder}" holds no checkpoint of torch.distributed.checkpoint: {one_line(exc, 120)}.'
            ) from exc
        self._kinds: Mapping[str, Any] = metadata.state_dict_metadata
        places: Mapping[str, _Path] = metadata.planner_data or {}
        self._places = {path[1:]: name for name, path in places.items() if path[0] == key and len(path) > 1}
        """Path of each value below the key -> the name it was saved under."""
        if ("format",) not in self._places:
            found = ", ".join(sorted({f'"{path[0]}"' for path in places.values()}))
            raise CheckpointError(
                f'the checkpoint in "{folder}" has no session state under "{key}", only {found or "nothing"}. Save it '
                f'with torch.distributed.checkpoint.save({{"{key}": session.state_dict(), ...}}).'
            )

    def head(self) -> dict[str, Any]:
        """All values that are not tensors; empty containers are not saved."""
        found = self._read({path: None for path in self._places if path[0] not in {"ranks", "digest"}})
        head: dict[str, Any] = {"order": [], "resize": {}, "digest": {}}
        head |= {path[0]: value for path, value in found.items() if len(path) == 1}
        # PyTorch may flatten lists, as it does dictionaries.
        head["order"] = head["order"] or [found[path] for path in sorted(found) if path[0] == "order" and len(path) > 1]
        head["resize"] = {path[1]: value for path, value in found.items() if path[0] == "resize"}
        return head

    def digest(self, rank: int) -> dict[str, torch.Tensor]:
        """The digest of the model of one rank, if there was one."""
        path = ("digest", str(rank))
        if path not in self._places:
            return {}
        return {str(rank): self._read({path: self._plain(path)})[path]}

    def state(self, rank: int, parameters: Mapping[str, torch.Tensor]) -> ParameterState:
        """The state of one rank; this rank's pieces of it where parameters are sharded."""
        wanted = {path: self._empty(path, parameters) for path in self._of_rank(rank, parameters)}
        found: ParameterState = {}
        for (_, _, name, field), value in self._read(wanted).items():
            found.setdefault(name, {})[field] = value
        return found

    def _of_rank(self, rank: int, parameters: Mapping[str, torch.Tensor]) -> Iterator[_Path]:
        for path in self._places:
            if path[0] == "ranks" and path[1] == str(rank):
                _, _, name, field = path
                mine = shard_key(parameters[name]) if name in parameters else ""
                _, bar, shard = field.rpartition("|shard ")
                if not bar or not mine or f"shard {shard}" == mine:  # other shards are left to their ranks
                    yield path

    def _empty(self, path: _Path, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        _, _, name, field = path
        whole = parameters.get(name)
        plain = self._plain(path)
        if whole is None or not is_sharded(whole) or "|shard " in field:
            return plain if whole is None else plain.to(local(whole).device)
        if plain.shape != whole.shape:
            raise CheckpointError(
                f"the checkpoint holds {tuple(plain.shape)} for {field} of parameter {name}, this model needs "
                f"{tuple(whole.shape)}. Load a checkpoint of the same model."
            )
        return as_piece_of(whole, torch.empty_like(local(whole), dtype=plain.dtype))

    def _plain(self, path: _Path) -> torch.Tensor:
        kind = self._kinds[self._places[path]]
        if not hasattr(kind, "size"):
            raise CheckpointError(f"the checkpoint holds no tensor for {'.'.join(map(str, path))}.")
        return torch.empty(kind.size, dtype=kind.properties.dtype)

    def _read(self, wanted: Mapping[_Path, Any]) -> dict[_Path, Any]:
        """The values at some places; tensors are filled."""
        import torch.distributed.checkpoint as dcp  # noqa: PLC0415 - as above

        values = {self._places[path]: value for path, value in wanted.items()}
        with warnings.catch_warnings():
            # Each rank by itself: ranks read different values, and one that cannot read must not block the others.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            try:
                dcp.load(values, storage_reader=self._reader, no_dist=True)
            except (dcp.CheckpointException, OSError, RuntimeError) as exc:
                raise CheckpointError(f"the checkpoint cannot be read: {one_line(exc, 200)}.") from exc
        return {path: values[self._places[path]] for path in wanted}
