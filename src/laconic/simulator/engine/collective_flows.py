"""A collective at flow level: messages of a step begin together, and the next step begins when they have arrived."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from laconic.collectives.schedule import Collective, chunk_bounds
from laconic.errors import UsageError
from laconic.simulator.engine.graph import NOWHERE, GraphBuilder

_Messages = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]
"""Sources, destinations and bytes."""


def add_collective(
    builder: GraphBuilder,
    collective: Collective,
    nbytes: int,
    *,
    ranks: Sequence[int] | None = None,
    step_latency_s: float = 0.0,
    resource: int = NOWHERE,
    priority: float = 0.0,
    after: Iterable[int] = (),
    label: int = 0,
) -> int:
    """One transfer per step of a collective of `nbytes`, each after the previous one; returns the last one's number.

    `ranks`: the devices that take part, in the order of the collective's ranks; default: devices 0, 1, 2 and so on.
    Every step costs `step_latency_s` in addition to the time of its bytes. A `resource` is free between two steps: a
    task with a lower priority value may then come first.
    """
    devices = np.arange(collective.world_size) if ranks is None else np.asarray(ranks, dtype=np.int64)
    if devices.shape != (collective.world_size,):
        raise UsageError(
            f"a collective of {collective.world_size} ranks needs as many devices in ranks, got {devices.size}."
        )
    if nbytes < 0:
        raise UsageError(f"a collective cannot carry {nbytes} bytes: nbytes must not be negative.")
    last = None
    for sources, destinations, sizes in messages(collective, nbytes):
        last = builder.transfer(
            devices[sources],
            devices[destinations],
            sizes,
            latency_s=step_latency_s,
            resource=resource,
            priority=priority,
            after=after if last is None else (last,),
            label=label,
        )
    if last is None:  # one rank has nothing to send
        return builder.timed(0.0, resource=resource, priority=priority, after=after, label=label)
    return last


@lru_cache(maxsize=8)
def messages(collective: Collective, nbytes: int) -> tuple[_Messages, ...]:
    """The messages of each step: all chunks from one rank to another are one message."""
    size, table = collective.world_size, collective.table
    chunk_bytes = np.diff(chunk_bounds(nbytes, collective.num_chunks)).astype(np.float64)
    # Step, source and destination as one number: rows of one message have the same.
    message = (table[:, 0].astype(np.int64) * size + table[:, 1]) * size + table[:, 2]
    row_bytes = chunk_bytes[table[:, 3]]
    if not (message[1:] >= message[:-1]).all():
        order = np.argsort(message, kind="stable")
        message, row_bytes = message[order], row_bytes[order]
    begins = np.flatnonzero(np.diff(message, prepend=-1))
    if not len(begins):
        return ()
    step, pair = np.divmod(message[begins], size * size)
    sources, destinations = np.divmod(pair, size)
    sizes = np.add.reduceat(row_bytes, begins)
    cuts = np.flatnonzero(np.diff(step)) + 1
    columns = (np.split(column, cuts) for column in (sources, destinations, sizes))
    return tuple(zip(*columns, strict=True))
