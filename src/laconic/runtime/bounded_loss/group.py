"""The ranks of a session that exchange datagrams: opened when it attaches, waited for, closed when it detaches."""

from __future__ import annotations

import math
import os
import secrets
import time

import numpy as np
import torch

from laconic.architecture.datagrams.loss_bound import LossBound
from laconic.core.exchange import one_round
from laconic.core.interface import local_address
from laconic.core.transport import Transport
from laconic.errors import CommunicationError, PeerLost, UnsupportedGradient
from laconic.runtime.agreement import gather_addresses, gather_bytes
from laconic.runtime.bounded_loss.frames import CODES, DTYPES
from laconic.runtime.bounded_loss.peers import Peers, Request
from laconic.runtime.datagrams import Datagrams
from laconic.runtime.engine import Task
from laconic.runtime.job import Job

_TAG_BYTES = 8
_SEND_BYTES = 2**16
"""A small buffer: frames queued in this host cannot be taken back, and peers waiting for them consider them lost."""
_SLICE_S = 0.25
"""How long a wait sleeps before it checks whether a peer has failed."""
_LISTEN_S = 2.0
"""The interval at which a wait checks whether all ranks are alive."""


class DatagramGroup:
    """One rank's side of a group that averages the rows that arrive; see core/exchange.py."""

    def __init__(self, job: Job, bound: LossBound) -> None:
        transport = job.transport
        self._job = job
        host = "127.0.0.1" if transport.in_process else local_address(os.environ.get("MASTER_ADDR"))
        datagrams = Datagrams(host, send_bytes=_SEND_BYTES)
        try:
            tag = gather_bytes(transport, secrets.token_bytes(_TAG_BYTES), "the tag of datagrams")[0]
            addresses = gather_addresses(transport, [datagrams.address], transport.world_size)
            self._peers = Peers(
                datagrams,
                addresses,
                rank=transport.rank,
                tag=int.from_bytes(tag),
                bound=bound,
                traffic=transport.traffic,
                link=transport.link,
            )
        except BaseException:
            datagrams.close()
            raise

    @property
    def lost_ratio(self) -> float:
        """The share of the rows sent to this rank that is missing from its sums."""
        return self._peers.lost_ratio

    def reduce(self, rows: torch.Tensor, *, what: str) -> ReducedRows:
        code = CODES.get(rows.dtype)
        if code is None:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES.values())
            raise UnsupportedGradient(f"datagrams carry {known}, got {rows.dtype} in {what}. Use all_reduce.")
        sent = rows.detach().cpu().contiguous()
        request = self._peers.reduce(sent.view(torch.uint8).numpy(), code, what=what)
        return ReducedRows(request, self._peers, rows, self._job.transport)

    def leave(self, at_most_s: float = math.inf) -> None:
        """Return when every rank has all means: until then another rank may ask this one for a lost row.

        at_most_s: then return nevertheless.
        """
        transport, what = self._job.transport, "the end of datagrams"
        here = torch.ones(1, device=transport.control_device)
        task = Task(
            what,
            lambda: one_round(transport.all_reduce(here, purpose="control", what=what)),
            step=self._job.step,
            device=here.device,
        )
        self._job.engine.submit(task)
        if math.isinf(at_most_s) or task.finished.wait(at_most_s):
            self._job.engine.wait(task)

    def close(self) -> None:
        """End the thread and release the socket, waiting for no other rank."""
        self._peers.close()


class ReducedRows:
    """A sum that is being formed; a PartialSum of core/exchange.py."""

    def __init__(self, request: Request, peers: Peers, sent: torch.Tensor, transport: Transport) -> None:
        self._request = request
        self._peers = peers
        self._like = sent
        self._transport = transport
        self._deadline_s = time.monotonic() + transport.timeout_s

    @property
    def rows(self) -> torch.Tensor:
        means = self._request.means
        assert means is not None, "not waited for"
        # One contiguous table of bytes, so every row begins where a value may.
        return torch.from_numpy(np.ascontiguousarray(means)).view(self._like.dtype).to(self._like.device)

    @property
    def lost_ratio(self) -> float:
        return self._request.lost_ratio

    def done(self) -> bool:
        return self._request.over.is_set()

    def wait(self) -> None:
        over = self._request.over
        if not over.wait(_SLICE_S):
            with self._transport.waiting_until(self._deadline_s):
                self._wait_for_others()
        if self._request.error is not None:
            raise self._request.error

    def _wait_for_others(self) -> None:
        """Return when the request is over; raise if a rank is lost or the time is up."""
        transport, what = self._transport, f"mean of {self._request.what}"
        listen_s = time.monotonic() + _LISTEN_S
        while not self._request.over.wait(_SLICE_S):
            transport.raise_if_peer_failed()
            if time.monotonic() >= listen_s:
                silent = transport.silent_rank(what)
                if silent is not None:
                    problem = "stopped answering"
                    transport.announce_failure(f"{problem}, says rank {transport.rank}", rank=silent)
                    raise PeerLost(
                        f"{what} on rank {transport.rank} cannot finish: rank {silent} {problem}.", rank=silent
                    )
                listen_s = time.monotonic() + _LISTEN_S
            if time.monotonic() >= self._deadline_s:
                problem = f"waited {transport.timeout_s:g} s for {self._peers.waits_for(self._request)}"
                transport.announce_failure(f"gave up: {what} {problem}")
                raise CommunicationError(f"{what} on rank {transport.rank} {problem}.")
