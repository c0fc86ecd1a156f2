"""The thread of a server that adds up frames: it owns a pool of slots and a UDP socket on the job's interface.

Ranks reach it with the tag of their job. The address of a rank is that of its first frame; later frames from elsewhere
are not accepted. Lost frames are found when a rank asks: the aggregator sends it the finished sums again, and the list
of its missing frames.
"""

from __future__ import annotations

import logging
import select
import threading

import numpy as np

from laconic.core.connection import Address
from laconic.errors import CommunicationError, one_line
from laconic.runtime.datagrams import Datagram, Datagrams
from laconic.runtime.in_network import frames as wire
from laconic.runtime.in_network.slot_pool import Places, SlotPool

_LOG = logging.getLogger("laconic")
_LOOK_S = 0.2
_CLOSE_S = 5.0
_NOBODY = 2**16 - 1
"""The rank field of frames that are sent to all ranks."""


class Aggregator:
    """Adds up the frames of one job until it is closed."""

    def __init__(self, datagrams: Datagrams, *, num_slots: int, world_size: int, tag: int, name: str) -> None:
        """Owns `datagrams` from now on."""
        self.name = name
        self.num_slots = num_slots
        self._tag = tag
        self._world_size = world_size
        self._pool = SlotPool(num_slots, world_size)
        self._lock = threading.Lock()
        self._addresses: dict[int, Address] = {}
        self._gone: set[int] = set()
        self._over: str | None = None
        self._closing = threading.Event()
        self._datagrams = datagrams
        self.address = self._datagrams.address
        """The address that ranks send frames to."""
        self._thread = threading.Thread(target=self._run, name=f"laconic-{name}-aggregator", daemon=True)
        self._thread.start()

    def waiting_for(self) -> tuple[float, list[int]]:
        """Seconds the oldest open chunk has waited, and the ranks it waits for."""
        with self._lock:
            return self._pool.waiting_for()

    def leave(self, rank: int) -> None:
        """This rank has detached: it takes part only in sums that it has contributed to."""
        with self._lock:
            self._gone.add(rank)
            late = rank in self._pool.waiting_for()[1]
        if late:
            self.fail(f"rank {rank} has detached and takes part in no more sums")

    def fail(self, reason: str) -> None:
        """Report to all ranks, now and when they ask, that the job has failed; the first reason stays."""
        with self._lock:
            if self._over is not None:
                return
            self._over = reason
            for rank in self._addresses:
                self._tell_failure(rank)

    def close(self) -> None:
        """End the thread and release the socket; closing twice is fine."""
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)
        self._datagrams.close()

    def _run(self) -> None:
        arrivals = select.poll()
        arrivals.register(self._datagrams, select.POLLIN)
        while not self._closing.is_set():
            arrivals.poll(1000 * _LOOK_S)
            while not self._closing.is_set() and (datagrams := self._datagrams.receive()):
                for datagram in datagrams:
                    self.take(datagram)

    def take(self, datagram: Datagram) -> None:
        """Handle the frames of a datagram; the thread of the aggregator continues, whatever they contain."""
        try:
            with self._lock:
                self._take(datagram)
        except CommunicationError as exc:
            self.fail(one_line(exc).rstrip("."))
        except Exception as exc:  # noqa: BLE001 - a mistake of ours must reach the ranks that wait
            _LOG.exception("%s: the aggregator failed.", self.name)
            self.fail(f"the aggregator of {self.name} failed: {type(exc).__name__}: {one_line(exc)}")

    def _take(self, datagram: Datagram) -> None:
        for frames in wire.read(datagram.content, datagram.segment_bytes, self._tag):
            ranks = frames.headers["rank"]
            for rank in np.unique(ranks).tolist():
                # A rank that does not exist has no address either.
                if rank < self._world_size and self._is_at(rank, datagram.sender):
                    self._take_from(rank, frames.only(ranks == rank))

    def _is_at(self, rank: int, address: Address) -> bool:
        return self._addresses.setdefault(rank, address) == address

    def _take_from(self, rank: int, frames: wire.Frames) -> None:
        if self._over is not None:
            self._tell_failure(rank)
            return
        kinds = frames.headers["kind"]
        parts = frames.only(kinds == wire.PART)
        if len(parts):
            outcome = self._pool.add(rank, parts)
            self._send_sums(outcome.complete, list(self._addresses.values()))
            self._send_sums(outcome.again, [self._addresses[rank]])
        for asked in np.flatnonzero(kinds == wire.ASK).tolist():
            self._answer(rank, int(frames.headers["chunk"][asked]), frames.values[asked])
        if self._gone and (missing := self._gone.intersection(self._pool.waiting_for()[1])):
            raise CommunicationError(f"rank {min(missing)} has detached and takes part in no more sums")

    def _send_sums(self, places: Places, addresses: list[Address]) -> None:
        for sums in self._pool.sums(places):
            rows = wire.write(wire.SUM, sums.chunks, sums.values, code=sums.code, rank=_NOBODY, tag=self._tag)
            for address in addresses:
                self._datagrams.send(rows, address)

    def _answer(self, rank: int, first: int, values: wire.Bytes) -> None:
        """Send the sums that a rank waits for, and the list of its missing frames."""
        if len(values) != 2:
            return
        complete, lacking = self._pool.asked(rank, first, int(values.view("<u2")[0]))
        self._send_sums(complete, [self._addresses[rank]])
        missing = np.array(lacking[: wire.VALUE_BYTES // 2], "<u2").tobytes()
        if missing:
            row = wire.write_one(wire.LACK, first, missing, rank=rank, tag=self._tag)
            self._datagrams.send(row, self._addresses[rank])

    def _tell_failure(self, rank: int) -> None:
        assert self._over is not None
        text = self._over.encode(errors="replace")[: wire.VALUE_BYTES]
        self._datagrams.send(wire.write_one(wire.FAIL, 0, text, rank=rank, tag=self._tag), self._addresses[rank])
