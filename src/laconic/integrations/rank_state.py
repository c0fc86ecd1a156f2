"""What each rank saves in addition to a framework's checkpoint.

Frameworks save the model and the optimizer of rank 0. Where all replicas are equal, only the session's state is
missing. Where replicas differ (local updates, gossip), every rank also needs its own model and optimizer to continue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from laconic.errors import CheckpointError
from laconic.runtime import Session
from laconic.runtime.digest import digests

MissingState = Literal["raise", "reset"]
"""What to do when a checkpoint holds no state of laconic, such as one saved under DDP: raise, or begin a new state."""


def replicas_differ(session: Session) -> bool:
    """Whether ranks hold different parameters between rounds."""
    return not session.strategy.exchanges_gradients()


def rank_state(session: Session, model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """What this rank needs to continue; every rank calls it."""
    session.settle()
    state: dict[str, Any] = {"session": session.state_dict()}
    if replicas_differ(session):
        state["model"] = model.state_dict()
        state["optimizers"] = [optimizer.state_dict() for optimizer in optimizers]
    return state


def load_rank_state(
    state: Mapping[str, Any], session: Session, model: nn.Module, optimizers: Sequence[Optimizer]
) -> None:
    """Continue from what rank_state() returned on this rank; every rank calls it, after the framework has loaded."""
    if "model" in state:
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    session.load_state_dict(state["session"])


def rank_file(folder: Path, rank: int, number: int = 0) -> Path:
    """Where a rank's state lies in the folder of a checkpoint; number: of the session, where several save there."""
    return folder / (f"laconic_rank{rank}_{number}.pt" if number else f"laconic_rank{rank}.pt")


def save_rank_file(
    folder: Path,
    session: Session,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    number: int = 0,
    is_in_checkpoint: bool = False,
) -> None:
    """Save what this rank needs to continue; every rank calls it.

    is_in_checkpoint: whether the framework has just saved this rank's model, with the values that it has now.
    """
    checksums = _checksums(model) if is_in_checkpoint else None
    state = rank_state(session, model, optimizers)
    if checksums is not None:
        state["model in checkpoint"] = checksums
    folder.mkdir(parents=True, exist_ok=True)
    path = rank_file(folder, session.rank, number)
    # Under another name first: a job that is killed here must not leave half a file.
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def load_rank_file(
    folder: Path,
    session: Session,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    how_to_reset: str,
    how_to_find: str = "",
    number: int = 0,
) -> None:
    """Load what save_rank_file() saved; every rank calls it.

    how_to_reset: what to do if there is no such file. how_to_find: if it belongs to another checkpoint.
    """
    path = rank_file(folder, session.rank, number)
    if not path.exists():
        raise no_state(path, session, how_to_reset)
    device = next(model.parameters()).device
    state = torch.load(path, map_location=device, weights_only=True)
    expected = state.get("model in checkpoint")
    if expected is not None and not torch.equal(expected.cpu(), _checksums(model)):
        raise CheckpointError(
            f"{path} does not belong to the checkpoint from which the model was loaded: the model had other values "
            f"when the two were saved. {how_to_find}"
        )
    load_rank_state(state, session, model, optimizers)


def _checksums(model: nn.Module) -> torch.Tensor:
    """One checksum per parameter."""
    return torch.tensor(digests(model.parameters()), dtype=torch.int64)


def no_state(where: object, session: Session, how_to_reset: str) -> CheckpointError:
    """The error for a checkpoint that holds no state of this rank."""
    return CheckpointError(
        f"{where} is not there: the checkpoint holds no state of laconic for rank {session.rank}. If ranks have disks "
        "of their own, resume each rank on the host that saved it. To begin a new state, for example after training "
        f"with DDP, {how_to_reset}."
    )
