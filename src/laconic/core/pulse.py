"""Who is to blame when a wait fails: heartbeats, status lines and last words in the job's store.

Every rank writes a beat and what it is doing into the store torch.distributed already has; the first rank that fails
writes why. Operations on a GPU do not make the host wait, so a thread watches over those that take long.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque

import torch
import torch.distributed as dist

from laconic.errors import CommunicationError, PeerLost, one_line

_LOG = logging.getLogger("laconic")
_LONG_S = 2.0
"""An operation on a GPU that takes longer is worth a look at the other ranks ..."""
_LOOK_EVERY_S = 5.0
"""... this often."""


class Pulse:
    """Heartbeats and last words in the job's store."""

    def __init__(self, group: dist.ProcessGroup, rank: int, world_size: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.rank = rank
        self.world_size = world_size
        self.status = "attaching"
        # A thousand ranks must not flood the store: two hundred beats a second in all are plenty.
        self.period_s = max(0.5, world_size / 200)
        self._store = dist.PrefixStore(f"laconic/{group.group_name}", job_store())
        self._stop = threading.Event()
        self._failure: tuple[int, str] | None = None
        self.lost: CommunicationError | None = None
        """What the watch over GPU operations has found out."""
        self._group = group
        self._watched: deque[tuple[float, str, torch.cuda.Event]] = deque()
        self._watch: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name="laconic-pulse", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        beat, stopped = 0, False
        while not stopped:
            stopped = self._stop.wait(self.period_s if beat else 0)
            try:
                self._store.set(f"beat/{self.rank}", f"{beat}|{self.status}")
            except RuntimeError:
                return  # the store is gone; the next wait on this rank fails and says so
            beat += 1

    def stop(self) -> None:
        """Stop beating; the last status stays readable."""
        self.status = "detached"
        self._stop.set()
        for thread in (self._thread, self._watch):
            if thread is not None:
                thread.join(timeout=5)

    def fail(self, rank: int, reason: str) -> None:
        """Record that `rank` has failed; the first record wins."""
        if self._failure is not None:
            return
        self._failure = (rank, reason)
        try:
            record = json.dumps({"rank": rank, "reason": reason})
            first = self._store.compare_set("failure", "", record) == record.encode()
        except RuntimeError:
            return  # nobody can read it any more: the store's host is gone
        if first and self.rank == 0:
            # Rank 0 often hosts the store: stay until the others have read why.
            time.sleep(2 * self.period_s)

    def check(self, operation: str) -> None:
        """Raise PeerLost if some rank has recorded a failure."""
        try:
            if not self._store.check(["failure"]):
                return
            record = json.loads(self._store.get("failure"))
        except RuntimeError as exc:
            raise self._store_gone(operation) from exc
        self._failure = (record["rank"], record["reason"])
        raise PeerLost(f"{operation} on rank {self.rank} cannot finish: rank {record['rank']} {record['reason']}.")

    def _store_gone(self, operation: str) -> PeerLost:
        return PeerLost(
            f"{operation} on rank {self.rank} cannot finish: rank 0 or the launcher, which hosts the job's store, "
            "is gone."
        )

    def explain(self, operation: str, cause: str, *, timed_out: bool = False) -> CommunicationError:
        """Find out which rank is to blame for a failed wait, tell the others, and make the error."""
        try:
            silent = self._silent_ranks(operation)
            if silent:
                rank, last = next(iter(silent.items()))
                reason = f'stopped answering; it last said "{last}"'
                self.fail(rank, reason)
                return PeerLost(f"{operation} on rank {self.rank} cannot finish: rank {rank} {reason}.")
            waiting = ", ".join(
                f'rank {rank} says "{self._read(rank)[1]}"' for rank in range(self.world_size) if rank != self.rank
            )
        except PeerLost as lost:
            return lost
        except RuntimeError:
            return self._store_gone(operation)
        waiting = one_line(waiting, 400)
        # With what was seen: this rank only gave up first, another one is to blame.
        self.fail(self.rank, f"gave up: {operation} {cause}; {waiting}")
        return CommunicationError(
            f"{operation} {'' if timed_out else 'failed '}on rank {self.rank}: {cause}; {waiting}."
        )

    def _read(self, rank: int) -> tuple[str, str]:
        if not self._store.check([f"beat/{rank}"]):
            return "", "nothing yet"
        beat, _, status = self._store.get(f"beat/{rank}").decode().partition("|")
        return beat, status

    def _silent_ranks(self, operation: str) -> dict[int, str]:
        """Ranks whose heart does not beat while we look; raises PeerLost if a failure is recorded meanwhile."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        first: dict[int, tuple[str, str]] = {}
        silent = set(others)
        for _ in range(6):
            self.check(operation)
            for rank in sorted(silent):
                seen = self._read(rank)
                if seen[0] != first.setdefault(rank, seen)[0]:
                    silent.discard(rank)
            if not silent:
                break
            time.sleep(self.period_s / 2)
        return {rank: first[rank][1] for rank in sorted(silent)}

    def watch(self, operation: str, finished: torch.cuda.Event) -> None:
        """Look after an operation nobody waits for on the host: name the rank that holds it up."""
        self._watched.append((time.monotonic(), operation, finished))
        if self._watch is None:
            self._watch = threading.Thread(target=self._watch_over, name="laconic-watch", daemon=True)
            self._watch.start()

    def _watch_over(self) -> None:
        looked_s = 0.0
        while not self._stop.wait(self.period_s) and self.lost is None:
            while self._watched and self._watched[0][2].query():
                self._watched.popleft()
            if not self._watched:
                continue
            began_s, operation, _ = self._watched[0]
            now_s = time.monotonic()
            if now_s - began_s >= self._timeout_s:
                self.lost = self.explain(operation, f"did not finish in {self._timeout_s:g} s", timed_out=True)
            elif now_s - began_s >= _LONG_S and now_s - looked_s >= _LOOK_EVERY_S:
                looked_s = now_s
                try:
                    if self._silent_ranks(operation):
                        self.lost = self.explain(operation, "")
                except PeerLost as exc:
                    self.lost = exc
                except RuntimeError:
                    self.lost = self._store_gone(operation)
            if self.lost is not None:
                _LOG.error("%s", self.lost)
                # Ends the operation, so that a host that waits for the device goes on and meets the error.
                self._group.abort()


def job_store() -> dist.Store:
    """A connection of our own to the job's store: a blocking call on a shared one would hold up everybody else's."""
    return dist.distributed_c10d._get_default_store().clone()  # pyrefly: ignore[missing-attribute]
