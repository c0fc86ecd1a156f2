"""Cuts and restores links of virtual hosts, from the network namespace of their switch.

A host is cut off by taking its port at the switch down: its own interface stays up and nothing arrives, as with a cable
that is pulled. Two hosts are cut off from each other by blackhole routes, which drop all packets between them. Neither
end is notified: connections stay open, and nothing arrives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from pyroute2 import IPRoute

from laconic.core.switch import enter_network
from laconic.errors import LaconicError, one_line
from laconic.lab import keeper


class Cables:
    """The links between the hosts whose network namespaces these are."""

    def __init__(self, namespaces: Sequence[str]) -> None:
        self._namespaces = namespaces
        _with_links(lambda links: links.link("set", index=links.link_lookup(ifname="lo")[0], state="up"))

    def cut(self, host: int, peer: int | None, *, cut: bool) -> None:
        """Cut the link between two hosts, or that of one host, or restore it."""
        if peer is None:
            port, state = keeper.port(host), "down" if cut else "up"
            _with_links(lambda links: links.link("set", index=links.link_lookup(ifname=port)[0], state=state))
            return
        for here, there in ((host, peer), (peer, host)):
            self._inside(here, keeper.address(there), cut)

    def _inside(self, host: int, destination: str, cut: bool) -> None:
        """Change the routes of one host, in a thread of its own, which can never leave the namespace."""
        problems: list[Exception] = []

        def change() -> None:
            try:
                enter_network(self._namespaces[host])
                verb = "add" if cut else "del"
                _with_links(lambda links: links.route(verb, dst=f"{destination}/32", type="blackhole"))
            except Exception as exc:  # noqa: BLE001 - raised below, in the thread that asked
                problems.append(exc)

        thread = threading.Thread(target=change, name=f"laconic-cable-{host}")
        thread.start()
        thread.join()
        if problems:
            what = "cut" if cut else "restored"
            raise LaconicError(
                f"the link from host {host} to {destination} cannot be {what}: {one_line(problems[0], 120)}."
            ) from problems[0]


def _with_links(change: Callable[[Any], object]) -> None:
    # pyroute2 makes its methods at run time, where no type checker sees them.
    with IPRoute() as links:
        change(links)
