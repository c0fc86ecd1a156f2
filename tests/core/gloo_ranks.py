"""What the ranks of the Gloo tests do; started by tests.processes, one process per rank."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from laconic.core.meeting import Meeting
from laconic.core.torch_distributed import TorchTransport
from laconic.errors import CommunicationError
from tests.core.operations import CASES, contribution
from tests.processes import eventually, gloo_group, is_running


def operations(word: str) -> dict[str, object]:
    """Every case of tests.core.operations on one transport, and the bytes each was counted at."""
    found: dict[str, object] = {"word": word, "port": os.environ["MASTER_PORT"], "threads": torch.get_num_threads()}
    with gloo_group():
        print(f"I am rank {dist.get_rank()}")
        transport = TorchTransport(timeout_s=20)
        try:
            for case in CASES:
                before = transport.traffic.by_operation()
                result = case.run(transport)
                after = transport.traffic.by_operation()
                sent = {key: value - before.get(key, 0) for key, value in after.items() if value != before.get(key, 0)}
                found[case.label] = {"result": result, "sent": sent}
            found["description"] = transport.description
            found["mixed"] = _interleaved(transport)
            found["sums unlike Gloo's"] = _unlike_gloo(transport)
        finally:
            transport.close()
            transport.close()
        found["group of two"] = _group_of_two()
    return found


def _unlike_gloo(transport: TorchTransport) -> list[str]:
    """Reduce-scatters whose bits are not those of Gloo's own: of rows that its segments do not divide, too."""
    found = []
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for numel in (1, 2, 3, 7, 33, 1001, 99_999, 300_001):
            generator = torch.Generator().manual_seed(transport.rank)
            rows = torch.randn(transport.world_size, numel, generator=generator).to(dtype)
            ours, theirs = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype)
            transport.reduce_scatter(ours, rows).wait()
            reduce_scatter(theirs, rows.view(-1))
            if not torch.equal(ours, theirs):
                found.append(f"{numel} of {dtype}")
    return found


def _interleaved(transport: TorchTransport) -> dict[str, torch.Tensor]:
    """Operations of the training script and of the transport between each other, waited for in another order."""
    ours = contribution(transport.rank, torch.float32, 1000)
    theirs = contribution(transport.rank, torch.float64, 1000)
    script = dist.all_reduce(theirs, async_op=True)
    first = transport.all_reduce(ours)
    gathered = torch.empty(transport.world_size, 3)
    second = transport.all_gather(gathered, torch.full((3,), float(transport.rank)))
    second.wait()
    first.wait()
    script.wait()
    return {"ours": ours, "theirs": theirs, "gathered": gathered}


def _group_of_two() -> dict[str, object] | None:
    """A transport over ranks 0 and the last one only: group ranks are not global ranks."""
    last = dist.get_world_size() - 1
    group = dist.new_group([0, last])
    if dist.get_rank() not in (0, last):
        return None
    transport = TorchTransport(group, timeout_s=20)
    try:
        tensor = torch.tensor([float(dist.get_rank())])
        transport.broadcast(tensor, source=1).wait()
        received = torch.empty(1)
        peer = 1 - transport.rank
        transport.send_receive([(peer, torch.tensor([10.0 + transport.rank]))], [(peer, received)]).wait()
        return {"rank": transport.rank, "world_size": transport.world_size, "from 1": tensor, "received": received}
    finally:
        transport.close()


def _error_of(action: Callable[[], None]) -> dict[str, object]:
    """What `action` raised, and how long that took."""
    started_s = time.monotonic()
    try:
        action()
    except Exception as error:  # noqa: BLE001 - what it was is the result
        return {
            "kind": type(error).__name__,
            "message": str(error),
            "seconds": time.monotonic() - started_s,
        }
    return {"kind": None, "message": "", "seconds": time.monotonic() - started_s}


def trouble() -> dict[str, object]:
    """Three ways in which rank 1 lets the others down while it lives; each on a fresh transport."""
    found: dict[str, object] = {}
    with gloo_group():
        rank = dist.get_rank()

        # 1. It says that it has failed.
        transport = TorchTransport(timeout_s=30)
        if rank == 1:
            transport.announce_failure("raised ValueError: no more data")
            found["told"] = _error_of(transport.raise_if_peer_failed)
        else:
            found["told"] = _error_of(transport.all_reduce(torch.ones(10), what="bucket 3").wait)
            found["check"] = _error_of(transport.raise_if_peer_failed)
            found["next"] = _error_of(lambda: transport.all_reduce(torch.ones(10), what="bucket 4").wait())
        dist.barrier()
        transport.close()

        # 2. It is busy with something else for longer than the timeout.
        transport = TorchTransport(timeout_s=2)
        if rank == 1:
            transport.set_status("reading a very large file")
            time.sleep(5)
            found["absent"] = None
        else:
            transport.set_status(f"waiting as rank {rank}")
            # Rank 2 comes later, so that rank 0 gives up first and rank 2 learns of it.
            time.sleep(0.75 * rank)
            found["absent"] = _error_of(transport.all_reduce(torch.ones(10), what="bucket 5").wait)
        dist.barrier()
        transport.close()

        # 3. Nothing of this sticks to a transport made later.
        transport = TorchTransport(timeout_s=20)
        ahead, behind = (rank + 1) % 3, (rank - 1) % 3
        received = torch.empty(4)
        transport.send_receive([(ahead, torch.full((4,), float(rank)))], [(behind, received)]).wait()
        total = torch.ones(2)
        transport.all_reduce(total).wait()
        transport.raise_if_peer_failed()
        found["later"] = {"received": received, "total": total}
        dist.barrier()
        transport.close()

        # 4. It does not attach at all. Last, because torch counts groups and rank 1 has now made one less.
        found["attach"] = None if rank == 1 else _error_of(lambda: TorchTransport(timeout_s=2).close())
        dist.barrier()
    return found


def wait_for_a_killed_rank(victim: int) -> dict[str, object]:
    """One exchange together, then rank `victim` says that it is ready to be killed and the others wait for it."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    transport = TorchTransport(timeout_s=60)
    transport.set_status("step 1")
    tensor = torch.ones(1000)
    transport.all_reduce(tensor, what="bucket 0").wait()
    transport.set_status("step 2")
    # Long enough for every heart to have said so.
    time.sleep(1.5)
    if rank == victim:
        print("kill me")
        time.sleep(60)
    found = _error_of(lambda: transport.all_reduce(tensor, what="bucket 7").wait())
    found["is a CommunicationError"] = found["kind"] in [
        kind.__name__ for kind in (CommunicationError, *CommunicationError.__subclasses__())
    ]
    closing = time.monotonic()
    with contextlib.suppress(RuntimeError):
        transport.close()
    found["close_s"] = time.monotonic() - closing
    return found


def outlive_the_store(detaches: bool) -> dict[str, object]:
    """Of two groups that of rank 0, the host of the store, ends; the other goes on, and then one of its ranks ends.

    detaches: rank 0 ends in order.
    """
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(4)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    transport = TorchTransport([dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2], timeout_s=30)
    dist.barrier()
    began_s = time.monotonic()
    if rank == 0 and not detaches:
        os._exit(1)
    if rank in (0, 2):
        transport.close()
        return {"close_s": time.monotonic() - began_s}
    if rank == 3:
        assert eventually(lambda: not is_running(int(pids[0])), 20)
        time.sleep(0 if detaches else 3)
    total = torch.full((1000,), float(rank))
    if not detaches:
        return _error_of(lambda: transport.all_reduce(total, what="bucket 0").wait())
    transport.all_reduce(total, what="bucket 0").wait()
    found: dict[str, object] = {"total": total, "waited_s": time.monotonic() - began_s}
    if rank == 1:
        found |= _error_of(lambda: transport.all_reduce(total, what="bucket 1").wait())
    closing = time.monotonic()
    transport.close()
    return {**found, "close_s": time.monotonic() - closing}


def attach_while_the_store_is_killed() -> dict[str, object]:
    """Rank 0, which hosts the store, says that it is ready to be killed while the others attach."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        print("kill me")
        time.sleep(60)
    return _error_of(lambda: TorchTransport(timeout_s=40).close())


class _EndsBeforeConnecting(dist.Store):
    """A store that ends the process once this rank has said where it can be reached, before it reaches others."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self._inner = inner

    def set(self, key: str, value: bytes) -> None:  # pyrefly: ignore[bad-override]
        self._inner.set(key, value)

    def wait(self, *_: object) -> None:  # pyrefly: ignore[bad-override]
        os._exit(0)

    def has_extended_api(self) -> bool:
        return False


def attach_while_a_rank_ends(timeout_s: float) -> dict[str, object]:
    """Rank 1 ends in the moment in which Gloo connects; rank 0 tells how long its thread for that is there."""
    dist.init_process_group("gloo")
    make_group = Meeting._gloo

    def ending(meeting: Meeting, limit: timedelta) -> dist.ProcessGroup:
        under = meeting.questions.under
        meeting.questions.under = lambda prefix: _EndsBeforeConnecting(under(prefix))  # type: ignore[method-assign]
        return make_group(meeting, limit)

    def late(meeting: Meeting, limit: timedelta) -> dist.ProcessGroup:
        time.sleep(1.0)  # until the other has ended
        return make_group(meeting, limit)

    Meeting._gloo = ending if dist.get_rank() == 1 else late  # type: ignore[method-assign]
    began_s = time.monotonic()
    found = _error_of(lambda: TorchTransport(timeout_s=timeout_s).close())
    while any(thread.name == "laconic-store" for thread in threading.enumerate()) and time.monotonic() < began_s + 40:
        time.sleep(0.05)
    found["thread_s"] = time.monotonic() - began_s
    return found


def attach_while_a_rank_is_late(timeout_s: float, late_s: float) -> float:
    """Rank 1 says where it is only after a while, less than the time limit; what all ranks have in sum then."""
    dist.init_process_group("gloo")
    make_group = Meeting._gloo

    def late(meeting: Meeting, limit: timedelta) -> dist.ProcessGroup:
        time.sleep(late_s)
        return make_group(meeting, limit)

    if dist.get_rank() == 1:
        Meeting._gloo = late  # type: ignore[method-assign]
    transport = TorchTransport(timeout_s=timeout_s)
    total = torch.ones(1)
    transport.all_reduce(total).wait()
    transport.close()
    dist.destroy_process_group()
    return float(total)
