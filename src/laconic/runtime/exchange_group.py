"""The process group that attach() is given, and its other ranks when this one cannot attach."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from laconic.core.meeting import refuse_to_meet
from laconic.errors import AttachError, one_line
from laconic.runtime.session import what_was_raised


def group_of_exchanges(model: object, given: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """The group that is given, or that of DistributedDataParallel; None: the default group."""
    group = _group_of(given)
    return model.process_group if group is None and isinstance(model, DistributedDataParallel) else group


def ranks_of(group: dist.ProcessGroup | None, joins: bool) -> list[int]:
    """The global ranks of a group, as in a device mesh; empty if there is no group, which the transport will report.

    joins: exchanges are with replicas that join the job, and the default group has the ranks of one replica.
    """
    if not dist.is_available() or not dist.is_initialized():
        return []
    return [dist.get_rank()] if joins else dist.get_process_group_ranks(group)


@contextmanager
def told_to_group(model: object, given: dist.ProcessGroup | DeviceMesh | None) -> Iterator[ExitStack]:
    """Inside, this rank attaches; if it raises before it meets the other ranks of the group, they raise too.

    They might wait for it until the timeout. Call pop_all() on what this gives just before the ranks meet.
    """
    refusal = ExitStack()
    refusal.push(lambda _, error, __: _tell(model, given, error))
    with refusal:
        yield refusal


def _tell(model: object, given: dist.ProcessGroup | DeviceMesh | None, error: BaseException | None) -> None:
    if not isinstance(error, Exception) or not dist.is_available() or not dist.is_initialized():
        return
    try:
        group = group_of_exchanges(model, given) or dist.group.WORLD
        assert group is not None
        if dist.get_world_size(group) > 1:
            refuse_to_meet(group, what_was_raised(error, " while attaching"))
    except AttachError:
        return  # without a group there is nobody to tell
    except Exception as problem:  # noqa: BLE001 - the first error is the one to raise
        error.add_note(f"laconic: the other ranks could not be told: {one_line(problem)}")


def _group_of(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise AttachError(
            "this rank is not a member of the process group given as process_group. Call attach() only on its ranks."
        )
    if not isinstance(group, DeviceMesh):
        raise AttachError(
            f"process_group must be a process group or a mesh of one dimension, got {group!r}. Give a group of "
            'dist.new_group(), or one dimension of a mesh, such as mesh["replicate"].'
        )
    if group.ndim != 1:
        names = group.mesh_dim_names
        shown = f'mesh["{names[0]}"]' if names else "a slice of it"
        raise AttachError(f"process_group is a mesh of {group.ndim} dimensions; give one of them, such as {shown}.")
    return group.get_group()
