"""The transports of one rank in the current view: for exchanges, for votes, and for the state that joiners receive."""

from __future__ import annotations

from contextlib import ExitStack

from laconic.core.transport import Traffic
from laconic.membership.member import Member
from laconic.membership.transport import ViewTransport
from laconic.membership.view import View


class Connections:
    """Exchanges are between the ranks with the same shards, one of each replica; all members of the view vote.

    If every replica has one rank, these are the same ranks, and there is one transport.
    """

    def __init__(self, member: Member, *, cuda: bool) -> None:
        self._member = member
        self._cuda = cuda
        self._traffic = Traffic()
        self._exchanges: ViewTransport | None = None
        self._votes: ViewTransport | None = None

    @property
    def exchanges(self) -> ViewTransport:
        """The ranks with the same shards."""
        assert self._exchanges is not None, "connect() comes first"
        return self._exchanges

    @property
    def votes(self) -> ViewTransport:
        """All members, for tensors on the CPU at least."""
        assert self._votes is not None, "connect() comes first"
        return self._votes

    def connect(self, view: View) -> None:
        """Connect to the members of a view; raises ViewBroken if it is over before all have connected."""
        member, alike = self._member, view.with_shards_of(self._member.name)
        if alike == view.members:
            self._exchanges = self._votes = ViewTransport(member, view, self._traffic, cuda=self._cuda)
            return
        part = f"shards {view.seat_of(member.name).position}"
        self._exchanges = ViewTransport(member, view, self._traffic, cuda=self._cuda, members=alike, part=part)
        self._votes = ViewTransport(member, view, self._traffic, cuda=False)

    def for_state(self, view: View) -> ViewTransport | None:
        """The ranks that receive the state of training, after the one that sends it; None: without this rank.

        The caller closes it.
        """
        member, members = self._member, view.with_state_of(self._member.name)
        if member.name not in members:
            return None
        part = f"state {view.seat_of(member.name).position}"
        return ViewTransport(member, view, self._traffic, cuda=self._cuda, members=members, part=part)

    def close(self) -> None:
        """End all operations; both transports are closed even if one of them raises. Closing twice is fine."""
        with ExitStack() as stack:
            for transport in (self._exchanges, self._votes):
                if transport is not None:
                    stack.callback(transport.close)
