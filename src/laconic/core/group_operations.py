"""The operations of a transport on a torch process group: the call for each of them, and the bytes it sends.

Transports that derive from GroupOperations handle waiting and failures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from laconic.core.sent_bytes import all_gather_sent, all_reduce_sent, broadcast_sent, shard_exchange_sent
from laconic.core.transport import DoneWork, Purpose, ReduceOp, Work

_GLOO_SEGMENT_BYTES = 1024 * 1024
"""The largest piece in which Gloo's ring sends."""
_LARGE_ROW_BYTES = 256 * 1024
"""From this size on, messages are faster than Gloo's all-to-all."""

# torch 2.13 renamed these; the old names warn there and the new ones do not exist in 2.11.
_all_gather_flat: Callable[..., dist.Work] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat: Callable[..., dist.Work] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)

Issue = Callable[[dist.ProcessGroup], "dist.Work | Sequence[dist.Work] | None"]
"""Starts an operation on a group."""


class GroupOperations:
    """The operations of one rank in a process group."""

    rank: int
    world_size: int
    _backends: Mapping[str, str]
    """The backend for each kind of device: {"cpu": "gloo", "cuda": "nccl"}."""

    def _start(
        self,
        issue: Issue,
        device: torch.device,
        *,
        operation: str,
        sent: int,
        purpose: Purpose,
        what: str,
        peers: bool = False,
    ) -> Work:
        """Count `sent` bytes and start an operation.

        peers: `issue` sends and receives between pairs of ranks.
        """
        raise NotImplementedError

    def waits_on_stream(self, device: torch.device) -> bool:
        return False

    def all_reduce(
        self, tensor: torch.Tensor, *, op: ReduceOp = "sum", purpose: Purpose = "payload", what: str = ""
    ) -> Work:
        if self.world_size == 1:
            return DoneWork()
        kind = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
        return self._start(
            lambda group: dist.all_reduce(tensor, op=kind, group=group, async_op=True),
            tensor.device,
            operation=f"all_reduce({op})",
            sent=all_reduce_sent(tensor.nbytes, self.world_size),
            purpose=purpose,
            what=what,
        )

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, purpose: Purpose = "payload", what: str = "") -> Work:
        if self.world_size == 1:
            return DoneWork()
        return self._start(
            lambda group: dist.broadcast(tensor, group=group, group_src=source, async_op=True),
            tensor.device,
            operation=f"broadcast({source})",
            sent=broadcast_sent(tensor.nbytes, self.world_size, (self.rank - source) % self.world_size),
            purpose=purpose,
            what=what,
        )

    def all_gather(
        self, output: torch.Tensor, tensor: torch.Tensor, *, purpose: Purpose = "payload", what: str = ""
    ) -> Work:
        if self.world_size == 1:
            output[0].copy_(tensor)
            return DoneWork()
        return self._start(
            lambda group: _all_gather_flat(output.view(-1), tensor.reshape(-1), group=group, async_op=True),
            tensor.device,
            operation="all_gather",
            sent=all_gather_sent(tensor.nbytes, self.world_size),
            purpose=purpose,
            what=what,
        )

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, *, purpose: Purpose = "payload", what: str = ""
    ) -> Work:
        if self.world_size == 1:
            output.copy_(tensor[0])
            return DoneWork()
        if self._backends.get(tensor.device.type) != "gloo":
            return self._start(
                lambda group: _reduce_scatter_flat(output.view(-1), tensor.reshape(-1), group=group, async_op=True),
                tensor.device,
                operation="reduce_scatter",
                sent=shard_exchange_sent(tensor.nbytes, self.world_size),
                purpose=purpose,
                what=what,
            )
        # Gloo's own reduce-scatter sends the bytes of an all-reduce; an all-to-all with a local sum sends half of that.
        shards = torch.empty_like(tensor)
        work = self._swap_rows(shards, tensor.contiguous(), "reduce_scatter", purpose, what)
        return _ThenSum(work, shards, output, self.rank)

    def all_to_all(
        self, output: torch.Tensor, tensor: torch.Tensor, *, purpose: Purpose = "payload", what: str = ""
    ) -> Work:
        if self.world_size == 1:
            output.copy_(tensor)
            return DoneWork()
        return self._swap_rows(output, tensor, "all_to_all", purpose, what)

    def _swap_rows(
        self, output: torch.Tensor, tensor: torch.Tensor, operation: str, purpose: Purpose, what: str
    ) -> Work:
        """Fill row r of `output` with row `rank` of rank r's `tensor`."""
        device = tensor.device
        as_messages = (
            device.type == "cpu" and self._backends.get("cpu") == "gloo" and tensor[0].nbytes >= _LARGE_ROW_BYTES
        )

        def issue(group: dist.ProcessGroup) -> dist.Work | Sequence[dist.Work] | None:
            if not as_messages:
                return dist.all_to_all_single(output, tensor, group=group, async_op=True)
            output[self.rank].copy_(tensor[self.rank])
            distances = range(1, self.world_size)
            places = [((self.rank + far) % self.world_size, (self.rank - far) % self.world_size) for far in distances]
            return _messages(group, [(to, tensor[to]) for to, _ in places], [(of, output[of]) for _, of in places])

        return self._start(
            issue,
            device,
            operation=operation,
            sent=shard_exchange_sent(tensor.nbytes, self.world_size),
            purpose=purpose,
            what=what,
            peers=as_messages,
        )

    def send_receive(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
        *,
        purpose: Purpose = "payload",
        what: str = "",
    ) -> Work:
        if not sends and not receives:
            return DoneWork()

        return self._start(
            lambda group: _messages(group, sends, receives),
            next(tensor for _, tensor in (*sends, *receives)).device,
            operation="send_receive",
            sent=sum(tensor.nbytes for _, tensor in sends),
            purpose=purpose,
            what=what,
            peers=True,
        )


class _ThenSum:
    """Shards that are summed once they have arrived, in the order of Gloo's own ring, so that every bit is the same."""

    def __init__(self, work: Work, shards: torch.Tensor, output: torch.Tensor, rank: int) -> None:
        self._work = work
        self._shards = shards
        self._output = output
        self._rank = rank

    def wait(self) -> None:
        self._work.wait()
        rows, total = self._shards.view(len(self._shards), -1), self._output.view(-1)
        for begin, end, last in _ring_chunks(rows.shape[1], total.element_size(), self._rank, len(rows)):
            part = total[begin:end]
            part.copy_(rows[last - 1, begin:end])
            for far in range(2, len(rows) + 1):
                part += rows[(last - far) % len(rows), begin:end]

    def done(self) -> bool:
        return self._work.done()


def _ring_chunks(numel: int, element_bytes: int, rank: int, world_size: int) -> Iterator[tuple[int, int, int]]:
    """The ranges in which Gloo's ring adds up row `rank` of n rows: begin, end, and the rank whose values come last.

    The ring cuts the whole into n chunks, one per rank. A chunk is added up backwards through the ranks, beginning with
    the rank before its own. Chunks are whole numbers of segments, so their borders are not quite those of the rows.
    """
    total_bytes = world_size * numel * element_bytes
    most_bytes = element_bytes * max(1, _GLOO_SEGMENT_BYTES // element_bytes)
    num_segments = max(-(-total_bytes // most_bytes), 2 * world_size)
    per_rank = -(-num_segments // world_size)
    segment_bytes = -(-total_bytes // (per_rank * world_size))
    chunk = per_rank * -(-segment_bytes // element_bytes)
    begin = rank * numel
    while begin < (rank + 1) * numel:
        end = min((begin // chunk + 1) * chunk, (rank + 1) * numel)
        yield begin - rank * numel, end - rank * numel, begin // chunk
        begin = end


def _messages(
    group: dist.ProcessGroup, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
) -> Sequence[dist.Work]:
    # Receives first: Gloo announces a posted receive over the same socket, where the announcement would queue behind a
    # large send, so that an exchange of two ranks would be serialized.
    operations = [dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer) for peer, tensor in receives]
    operations += [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for peer, tensor in sends]
    return dist.batch_isend_irecv(operations)
