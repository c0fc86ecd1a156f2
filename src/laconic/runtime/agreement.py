"""Checks that all ranks call the same operation with the same arguments, when attaching and later."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence

import torch

from laconic.core.connection import Address
from laconic.core.exchange import Exchange
from laconic.core.transport import Purpose, Transport
from laconic.errors import AttachError, CommunicationError, PeerLost, one_line
from laconic.runtime.digest import digests
from laconic.runtime.job import Job
from laconic.runtime.shards import is_sharded, local, place_of

_ADDRESS_BYTES = 256
_ANY_EXCHANGE = 2**62
"""A number above that of any exchange."""
_LAST_WORDS_S = 2.0
"""How long the announcement of a rank that has ended may take to arrive through the job's store."""


def check_agreement(job: Job, *, init_sync: bool, sync_optimizer: bool) -> None:
    """Raise on every rank, naming the first difference, unless all ranks attach the same model and strategy."""
    transport = job.transport
    description = {
        "strategy": job.chosen_by or str(job.strategy),
        "init_sync": str(init_sync),
        "sync_optimizer": str(sync_optimizer),
        "find_unused_parameters": str(job.find_unused_parameters),
        "the model's class": type(job.model).__name__,
    }
    if job.strategy.architecture.holds_shards:
        # Each rank holds another shard of the same parameters.
        description |= {f"parameter {name}": _whole(p) for name, p in job.model.named_parameters()}
    else:
        description |= _pieces(job)
    description |= {f"buffer {name}": _describe(buffer) for name, buffer in job.model.named_buffers()}
    descriptions = differing(transport, description)
    for rank, other in enumerate(descriptions):
        found = first_difference(descriptions[0], other)
        if found is not None:
            key, here, there = found
            raise AttachError(
                f"ranks attach different things: {key} is {one_line(here, 80)} on rank 0 and {one_line(there, 80)} on "
                f"rank {rank}. Build the same model and strategy on every rank."
            )
        if list(descriptions[0]) != list(other):
            raise AttachError(
                f"ranks attach different things: rank {rank} has its parameters in another order than rank 0. Build "
                "the same model on every rank."
            )


def _pieces(job: Job) -> dict[str, str]:
    """The properties of parameters, or of this rank's pieces of them, that must be the same on every rank."""
    found = {f"parameter {name}": _describe(parameter) for name, parameter in job.parameters.items()}
    # Buckets are laid out by strides: the same element must lie in the same place everywhere.
    found |= {f"strides of {name}": str(piece.stride()) for name, piece in job.values.items()}
    # Pieces of equal shape may be pieces of different places.
    everything = [*job.model.named_parameters(), *job.model.named_buffers()]
    found |= {f"shard of {name}": place for name, tensor in everything if (place := place_of(tensor))}
    return found | {f"frozen {name}": _describe(p) for name, p in job.model.named_parameters() if not p.requires_grad}


def differing(transport: Transport, description: Mapping[str, str]) -> list[dict[str, str]]:
    """The descriptions of all ranks; none if they are equal, in which case only their hashes are exchanged."""
    text = json.dumps(description).encode()
    hashes = gather_bytes(transport, hashlib.sha256(text).digest(), "agreement digests")
    if all(other == hashes[0] for other in hashes):
        return []
    sizes = gather_bytes(transport, len(text).to_bytes(8, "big"), "agreement sizes")
    largest = max(int.from_bytes(size, "big") for size in sizes)
    return [json.loads(text) for text in gather_bytes(transport, text.ljust(largest), "agreement texts")]


def first_difference(first: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, str, str] | None:
    """The first key under which two descriptions differ, and its value in each."""
    for key in [*first, *(key for key in other if key not in first)]:
        if first.get(key) != other.get(key):
            return key, first.get(key, "missing"), other.get(key, "missing")
    return None


def agree(job: Job, operation: str, about: Mapping[str, str] | None = None) -> list[dict[str, str]]:
    """Raise on every rank unless all call `operation` after the same number of steps; return each rank's `about`.

    Every collective operation of a session begins with this. The texts are not sent over the tensor transport: if
    another rank were in an exchange of a different size instead, Gloo would end the process.
    """
    if job.join is not None:
        raise CommunicationError(f"{operation} was called inside session.join(). Leave that block first.")
    transport = job.transport
    together = job.strategy.synchronization.barrier
    steps = str(job.step) if together else "any"
    mine = {"operation": operation, "steps": steps, **(about or {})}
    if transport.world_size == 1:
        return [mine]
    what = f"{operation} after {job.step} steps"
    advice = f"Every rank must call {operation}"
    if together:
        advice += " after the same number of steps"
    whom = job.strategy.architecture
    whole = not whom.holds_shards and not any(map(is_sharded, job.parameters.values()))
    if together and whom.scope == "everyone" and not whom.has_servers and whole:
        advice += '. Where ranks have different amounts of data, train inside "with session.join():"'
    transport.set_status(what)
    # Without a barrier ranks exchange independently, so the number of exchanges does not say how far a rank is.
    number = job.engine.num_submitted if together else _ANY_EXCHANGE
    texts = transport.gather_texts(json.dumps(mine), what=what, exchange=number, advice=f"{advice}.")
    said: list[dict[str, str]] = [json.loads(text) for text in texts]
    for rank, other in enumerate(said):
        if (said[0]["operation"], said[0]["steps"]) != (other["operation"], other["steps"]):
            where = [f"is in {row['operation']} after {row['steps']} steps" for row in (said[0], other)]
            raise CommunicationError(f"rank 0 {where[0]}, rank {rank} {where[1]}. {advice}.")
    return said


def agree_on(job: Job, operation: str, about: Mapping[str, str]) -> None:
    """Return when every rank has called this operation with the same `about`; raise on every rank if one differs."""
    said = agree(job, operation, about)
    for rank, other in enumerate(said):
        found = first_difference(said[0], other)
        if found is not None:
            key, here, there = found
            raise AttachError(
                f"{operation} differs between ranks: {key} is {one_line(here, 80)} on rank 0 and {one_line(there, 80)} "
                f"on rank {rank}."
            )


def check_equal(job: Job) -> None:
    """Raise on every rank unless parameters and buffers are equal on all ranks, as init_sync=False promises."""
    named = [*job.model.named_parameters(), *job.model.named_buffers()]
    mine = torch.tensor(
        digests(local(tensor) for _, tensor in named), dtype=torch.int64, device=job.transport.control_device
    )
    rows = torch.empty((job.transport.world_size, len(named)), dtype=torch.int64, device=job.transport.control_device)
    job.transport.all_gather(rows, mine, purpose="control", what="checksums of parameters").wait()
    for rank, row in enumerate(rows.tolist()):
        for (name, _), here, there in zip(named, rows[0].tolist(), row, strict=True):
            if here != there:
                raise AttachError(
                    f'init_sync=False promises equal replicas, but "{name}" is not the same on rank 0 and rank {rank}. '
                    "Attach with init_sync=True."
                )


def broadcast_all(
    transport: Transport, tensors: Sequence[torch.Tensor], *, purpose: Purpose, what: str, source: int = 0
) -> Exchange:
    """Overwrite `tensors` with those of rank `source`: one message per device, whatever the dtypes."""
    devices: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in map(local, tensors):
        if tensor.numel():
            devices.setdefault(tensor.device, []).append(tensor.detach())
    for group in devices.values():
        # As bytes: a copy needs no arithmetic, and not every backend supports every dtype.
        packed = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in group])
        yield transport.broadcast(packed, source=source, purpose=purpose, what=what)
        start = 0
        for tensor in group:
            # The clone starts at an aligned address, which a slice of bytes need not.
            received = packed[start : start + tensor.nbytes].clone().view(tensor.dtype).view(tensor.shape)
            tensor.copy_(received)
            start += tensor.nbytes


def _whole(parameter: torch.Tensor) -> str:
    frozen = "" if parameter.requires_grad else ", frozen"
    return f"{tuple(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}{frozen}"


def _describe(tensor: torch.Tensor) -> str:
    tensor = local(tensor)
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} ({tensor.device.type})"


def meet(transport: Transport, what: str) -> None:
    """Return when every rank has called this."""
    gather_bytes(transport, b"here", what)


def with_last_words(error: PeerLost, transport: Transport) -> PeerLost:
    """The error, with the reason why a rank has ended if that rank's announcement arrives within a moment."""
    deadline_s = time.monotonic() + _LAST_WORDS_S
    while time.monotonic() < deadline_s:
        try:
            transport.raise_if_peer_failed()
        except PeerLost as words:
            # First the cause: a rank may have ended because of another one.
            return PeerLost(f"{words} Also: {error}", rank=words.rank)
        time.sleep(0.1)
    return error


def gather_addresses(transport: Transport, mine: Sequence[Address], total: int) -> list[Address]:
    """Addresses of all ranks: rank r has those numbered r, r + n, r + 2n, ... below `total`."""
    # Every list is padded to the length of the longest.
    most = -(-total // transport.world_size)
    texts = [f"{host}:{port}" for host, port in mine]
    said = b"".join(text.encode().ljust(_ADDRESS_BYTES) for text in [*texts, *[""] * (most - len(texts))])
    rows = gather_bytes(transport, said, "addresses")
    return [
        read_address(row[place * _ADDRESS_BYTES : (place + 1) * _ADDRESS_BYTES].decode().strip())
        for place in range(most)
        for rank, row in enumerate(rows)
        if place * transport.world_size + rank < total
    ]


def read_address(text: str) -> Address:
    """An address written as host:port."""
    host, _, port = text.rpartition(":")
    return host, int(port)


def gather_bytes(transport: Transport, data: bytes, what: str) -> list[bytes]:
    """Gather the bytes of every rank; all ranks must pass the same number."""
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(transport.control_device)
    rows = torch.empty((transport.world_size, len(data)), dtype=torch.uint8, device=transport.control_device)
    transport.all_gather(rows, mine, purpose="control", what=what).wait()
    return [bytes(row.tolist()) for row in rows.cpu()]
