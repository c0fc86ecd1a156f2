"""torch's own DistributedDataParallel on a paced link, so that it can be compared with a PacedTransport on equal terms.

    link = link_from_environment(os.environ)
    ddp = DistributedDataParallel(model)
    if link is not None:
        pace_ddp(ddp, link)

A communication hook repeats DDP's own arithmetic bit for bit - multiply by 1/n, all-reduce - and delays the bucket
until it would have arrived over the link. Only gradients are paced: DDP's initial values and buffers are not.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from laconic.core.paced import PacedLink
from laconic.core.sent_bytes import all_reduce_sent
from laconic.errors import LaconicError


@dataclass(frozen=True)
class _Pace:
    """The state of the hook, kept by DDP."""

    group: dist.ProcessGroup
    link: PacedLink


def pace_ddp(model: DistributedDataParallel, link: PacedLink) -> None:
    """Pace `model`'s all-reduces by `link`; DDP keeps the hook for good."""
    if model._comm_hooks:
        raise LaconicError("this DistributedDataParallel model already has a communication hook; it can have only one.")
    group = model.process_group
    assert group is not None
    if model.gradient_as_bucket_view and group.size() & (group.size() - 1):
        raise LaconicError(
            "with gradient_as_bucket_view=True DDP divides some gradients and multiplies others, which no hook can "
            f"repeat for {group.size()} ranks. Leave it off, or use a power of two as the number of ranks."
        )
    model.register_comm_hook(_Pace(group, link), _communicate)


# Without annotations: DDP compares those of a hook with its own classes, and here they would be text.
def _communicate(pace, bucket):
    """Average a bucket as DDP would, and not sooner than the link allows."""
    # Multiplied, not divided: the same operation as DDP without a hook, bit for bit.
    flat = bucket.buffer().mul_(1.0 / pace.group.size())
    work = dist.all_reduce(flat, group=pace.group, async_op=True).get_future()
    due_s = pace.link.reserve(all_reduce_sent(flat.nbytes, pace.group.size()))
    left: torch.futures.Future[None] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
    # In `then`, because an error raised there reaches DDP. The process group's time limit bounds the wait.
    arrived = left.then(lambda _: work.wait()[0])
    timer = threading.Timer(max(0.0, due_s - pace.link.clock.now()), left.set_result, (None,))
    timer.daemon = True  # a rank that fails does not wait for its link
    timer.start()
    return arrived
