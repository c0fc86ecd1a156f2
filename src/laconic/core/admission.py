"""Connections that have not shown the job's token yet: few in all, and few from one address.

A new connection is never refused: when there are too many, the oldest one of the busiest address is closed. A rank
shows its token within milliseconds, so peers that connect and send nothing cannot keep it out.
"""

from __future__ import annotations

from collections import Counter

from laconic.core.connection import Connection


class Unauthenticated:
    """The connections of a listener that are still without a token; the listener's lock guards it."""

    def __init__(self, *, at_most: int, at_most_per_address: int) -> None:
        self._at_most = at_most
        self._at_most_per_address = at_most_per_address
        self._hosts: dict[Connection, str] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._hosts)

    def add(self, connection: Connection, host: str) -> Connection | None:
        """Add a connection from `host`; returns the one to be closed for it, if there are too many."""
        per_host = Counter(self._hosts.values())
        busiest: str | None = None
        if per_host[host] >= self._at_most_per_address:
            busiest = host
        elif len(self._hosts) >= self._at_most:
            busiest = per_host.most_common(1)[0][0]
        oldest = next((one for one, its_host in self._hosts.items() if its_host == busiest), None)
        if oldest is not None:
            del self._hosts[oldest]
        self._hosts[connection] = host
        return oldest

    def remove(self, connection: Connection) -> bool:
        """Remove a connection; returns whether it was here."""
        return self._hosts.pop(connection, None) is not None

    def all(self) -> list[Connection]:
        """All connections without a token, oldest first."""
        return list(self._hosts)
