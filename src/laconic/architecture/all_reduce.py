"""All ranks average with all ranks, without a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from laconic.architecture.contract import Architecture, Codec, Measure, Scope
from laconic.collectives import ALGORITHMS, Collective
from laconic.collectives.choice import NATIVE, Costs, fastest, in_words
from laconic.collectives.decoupled import DecoupledSums, decoupled_sent, share_bytes
from laconic.collectives.execution import WholeExchange, idle, run, unrolled
from laconic.collectives.hierarchical import from_leaders, to_leaders
from laconic.collectives.members import Members, messages_among
from laconic.collectives.placement import groups_in_words, placed
from laconic.collectives.price import price
from laconic.collectives.ring import RING, ring
from laconic.collectives.schedule import halves_of
from laconic.core.exchange import Exchange, Move, Round, Wire, round_sent
from laconic.core.hosts import Hosts, hosts_alone
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.transport import AllWork, Transport, Work
from laconic.errors import AttachError, InvalidSetting
from laconic.settings import choice

_AUTO = "auto"
_MEASURED = "measured"
Chosen = Callable[[int], Collective | None]
"""The collective for a sum of this many bytes; None: the backend's own."""


@dataclass(frozen=True, kw_only=True)
class AllReduce(Architecture):
    """Every replica ends with the mean of all contributions.

    native: the backend's own all-reduce, 2 (n-1)/n N bytes per rank. The other algorithms are laconic's, made of
    sends and receives. They differ in sums only: gathers, scatters and swaps of a compressor are the same with all.
    """

    name: ClassVar[str] = "all_reduce"
    scope: ClassVar[Scope] = "everyone"

    only_speed: ClassVar[tuple[str, ...]] = ("algorithm", "compress", "placement")
    shows_on_links: ClassVar[tuple[str, ...]] = ("placement",)

    algorithm: str = choice(NATIVE, _AUTO, *ALGORITHMS)
    """How a sum is formed; native leaves it to the backend (Gloo, NCCL), auto measures when attaching and takes the
    fastest for each size."""
    compress: str = choice("all", "between_hosts")
    """Where the compressor works; between_hosts: plain values inside a host, whose sum one of its ranks compresses."""

    placement: str = choice("by_host", _MEASURED)
    """How ranks are grouped and ordered; by_host: ranks that share a host form a group, in the order of their numbers;
    measured: ranks that exchange fast while all others exchange too, such as those of a rack behind a slow uplink."""

    hosts: Hosts = field(default=(), kw_only=True)
    """The groups of ranks, in the order in which a ring goes through them; known once attached."""
    costs: Costs | None = field(default=None, kw_only=True)
    """The measurements of auto; known once attached."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compress != "all" and not self.tells_hosts_apart():
            by_host = " or ".join(name for name, algorithm in ALGORITHMS.items() if algorithm.by_host)
            raise InvalidSetting(
                f"{self.axis}.{self.name}.compress={self.compress} has no effect with algorithm={self.algorithm}, "
                f"which does not distinguish hosts. Use algorithm={by_host}, or leave it out."
            )
        if self.placement == _MEASURED and self.algorithm == NATIVE:
            raise InvalidSetting(
                f"{self.axis}.{self.name}.placement={_MEASURED} has no effect with algorithm={NATIVE}, whose order is "
                f"the backend's. Use algorithm={RING.name} or another one, or leave it out."
            )

    def settled(self, hosts: Callable[[], Hosts], measure: Measure) -> AllReduce:
        """The same architecture with the hosts of ranks and, for auto, the time of each algorithm.

        Raises AttachError if the algorithm would be a different one on these hosts.
        """
        if self.algorithm == NATIVE or sum(map(len, where := hosts())) == 1:
            return self
        if self.placement == _MEASURED:
            where = placed(where, measure.pairs())
        if self.algorithm == _AUTO:
            return replace(self, hosts=where, costs=measure.costs(sensible(where), where))
        if (reason := ALGORITHMS[self.algorithm].unfit(where)) is not None:
            alike = ", and all pairs of them are about as fast" if self.placement == _MEASURED else ""
            raise AttachError(
                f'architecture "{self}" has no effect here: {reason}{alike}. Use algorithm={RING.name} or {NATIVE}.'
            )
        return replace(self, hosts=where)

    def fixed_ranks(self, least: int, most: int) -> str | None:
        """Why the set of ranks may not change: times, hosts or the number of ranks decide how sums are formed."""
        use = f"Use algorithm={NATIVE} or {RING.name}"
        if self.algorithm == _AUTO:
            return f"algorithm={_AUTO} measures among fixed ranks. {use}"
        if self.tells_hosts_apart():
            return f"algorithm={self.algorithm} is made for fixed hosts. {use}"
        if self.placement == _MEASURED:
            return f"placement={_MEASURED} measures among fixed ranks. Leave it out"
        for number in range(least, most + 1) if self.algorithm != NATIVE else ():
            if number > 1 and (reason := ALGORITHMS[self.algorithm].unfit(hosts_alone(number))) is not None:
                return f"algorithm={self.algorithm} does not fit {number} ranks: {reason}. {use}"
        return None

    def facts(self) -> dict[str, str]:
        """The algorithm that auto uses from each size on, and the groups of ranks by measured rates."""
        groups = {"groups": groups_in_words(self._groups())} if self._groups() else {}
        return groups | ({} if self.costs is None else {"algorithms": in_words(self.costs)})

    def _groups(self, algorithm: str = "") -> Hosts:
        """The groups of ranks by measured rates; empty before the measurement, and for the backend's own algorithm."""
        return self.hosts if self.placement == _MEASURED and algorithm != NATIVE else ()

    def tells_hosts_apart(self) -> bool:
        """As the algorithm declares; unknown for auto before it has measured."""
        return self.algorithm in ALGORITHMS and ALGORITHMS[self.algorithm].by_host

    def forms_sums(self) -> bool:
        """True unless sums are left to the backend."""
        return self.algorithm != NATIVE

    def compresses_sums(self) -> bool:
        """Whether the sum of a host is compressed, not the values of each rank."""
        return self.compress == "between_hosts"

    def exchange(
        self, flat: torch.Tensor, state: BucketState, compression: Codec, wire: Wire, own: torch.Tensor | None = None
    ) -> Exchange:
        """Exchange with the compressor in a group of all ranks, or of one rank of each host."""
        transport = wire.transport
        moment = replace(state.moment, rank=transport.rank, world_size=transport.world_size)
        here = self if self.hosts or not self.forms_sums() else replace(self, hosts=transport.hosts)
        if self.compresses_sums() and transport.world_size > 1:
            assert own is None, "refused by the rules of legality: what a rank has sent is lost in the sum of its host"
            return here._between_hosts(flat, state, compression, wire)
        group = Everyone(transport, wire.what, here._chosen(moment), decoupled=wire.decoupled)
        exchange = compression.exchange(flat, state, group, own)
        if wire.decoupled or not self.forms_sums():
            return exchange
        return unrolled(exchange, here.num_waits(state.bucket, compression, moment))

    def _between_hosts(self, flat: torch.Tensor, state: BucketState, compression: Codec, wire: Wire) -> Exchange:
        """Sum inside each host, exchange the sums among one rank of each, distribute the result."""
        transport, hosts = wire.transport, self.hosts
        leaders = [host[0] for host in hosts]
        moment = replace(state.moment, rank=transport.rank, world_size=transport.world_size)
        among = self._among_leaders(moment)
        num_waits = _num_waits(state.bucket, compression, among, _around_hosts(hosts))
        yield from run(to_leaders(hosts), transport, (flat,), what=wire.what)
        if transport.rank in leaders:
            state.moment = among
            group = Members(transport, leaders, wire.what)
            yield from unrolled(compression.exchange(flat, state, group), num_waits)
            state.moment = moment
        else:
            # All ranks have the same number of waits, so that later operations are issued in the same order everywhere.
            yield from idle(num_waits)
        yield from run(from_leaders(hosts), transport, (flat,), what=wire.what)

    def sent_bytes(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """All rounds of the compressor, and plain values inside hosts where only traffic between hosts is compressed.

        Before attaching, hosts are unknown: the bytes of hierarchical are then computed for the same number of ranks
        on each host or, if it compresses between hosts, for one.
        """
        if not self.compresses_sums():
            chosen = self._chosen(moment)
            return sum(_sent(round, moment, chosen) for round in compression.rounds(bucket, moment))
        hosts = self._known_hosts(moment)
        inside = [price(part(hosts), bucket.nbytes).sent_bytes[moment.rank] for part in (to_leaders, from_leaders)]
        if moment.rank not in [host[0] for host in hosts]:
            return sum(inside)
        among = self._among_leaders(moment)
        rounds = compression.rounds(bucket, among)
        return sum(inside) + sum(_sent(round, among, _around_hosts(hosts)) for round in rounds)

    def decoupled_bytes(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """All rounds of the compressor, which are sums."""
        rounds, chosen = compression.rounds(bucket, moment), self._chosen(moment)
        return sum(
            sum(decoupled_sent(size, moment.world_size) for size in round.sizes)
            if chosen(sum(round.sizes)) is None
            else _sent(round, moment, chosen)
            for round in rounds
        )

    def moves(self, bucket: Bucket, compression: Codec, moment: Moment, *, decoupled: bool = False) -> tuple[Move, ...]:
        """The rounds of the compressor, with steps inside hosts where only traffic between hosts is compressed."""
        if self.compresses_sums():
            among = self._among_leaders(moment)
            between = (
                Move(
                    round.kind,
                    round.sizes,
                    RING.name if round.kind == "sum" else NATIVE,
                    among_hosts=True,
                    groups=self._groups(),
                )
                for round in compression.rounds(bucket, among)
            )
            size = (bucket.nbytes,)
            inside = [Move(kind, size, groups=self._groups()) for kind in ("to_leaders", "from_leaders")]
            return inside[0], *between, inside[1]
        found: list[Move] = []
        for round in compression.rounds(bucket, moment):
            if round.kind != "sum":
                found.append(Move(round.kind, round.sizes))
            elif decoupled:
                found += self._decoupled(round.sizes, moment.world_size)
            else:
                algorithm = self._named(sum(round.sizes))
                found.append(Move("sum", round.sizes, algorithm, groups=self._groups(algorithm)))
        # Sums that are made side by side are all begun before the second half of any of them.
        return tuple(sorted(found, key=lambda move: move.kind != "scatter_sum")) if decoupled else tuple(found)

    def _decoupled(self, sizes: tuple[int, ...], world_size: int) -> tuple[Move, Move]:
        """A decoupled sum: every rank first gets its share, later the other shares."""
        algorithm = self._named(sum(sizes))
        if algorithm == NATIVE:
            shares = tuple(share_bytes(size, world_size) for size in sizes)
            sizes = tuple(world_size * share for share in shares)
        else:
            shares = tuple(-(-size // world_size) for size in sizes)
        groups = self._groups(algorithm)
        return Move("scatter_sum", sizes, algorithm, groups=groups), Move("gather", shares, algorithm, groups=groups)

    def _named(self, nbytes: int) -> str:
        """The algorithm for a sum of this many bytes."""
        return fastest(self.costs, nbytes) if self.algorithm == _AUTO else self.algorithm

    def num_waits(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """The waits of the compressor, with one for each step of a sum."""
        if not self.compresses_sums():
            return _num_waits(bucket, compression, moment, self._chosen(moment))
        hosts = self._known_hosts(moment)
        inside = to_leaders(hosts).num_steps + from_leaders(hosts).num_steps
        return inside + _num_waits(bucket, compression, self._among_leaders(moment), _around_hosts(hosts))

    def _chosen(self, moment: Moment) -> Chosen:
        """How sums are formed."""
        if self.algorithm == NATIVE or (self.tells_hosts_apart() and not self.hosts):
            return lambda nbytes: None  # with equal hosts, hierarchical sends the same bytes
        hosts = self._known_hosts(moment)
        if self.algorithm == _AUTO:
            return lambda nbytes: None if (found := fastest(self.costs, nbytes)) == NATIVE else ALGORITHMS[found](hosts)
        return lambda nbytes: ALGORITHMS[self.algorithm](hosts)

    def _known_hosts(self, moment: Moment) -> Hosts:
        return self.hosts or hosts_alone(moment.world_size)

    def _among_leaders(self, moment: Moment) -> Moment:
        """The moment of this host's leader, its first rank, in the group of all hosts' leaders."""
        hosts = self._known_hosts(moment)
        place = next(number for number, host in enumerate(hosts) if moment.rank in host)
        return replace(moment, rank=place, world_size=len(hosts))


def _around_hosts(hosts: Hosts) -> Chosen:
    """Sums among one rank of each host go around a ring."""
    return lambda nbytes: ring(len(hosts))


def sensible(hosts: Hosts) -> list[str]:
    """The algorithms that differ from each other on these hosts."""
    world_size = sum(map(len, hosts))
    return [
        name
        for name, algorithm in ALGORITHMS.items()
        if world_size >= algorithm.least_ranks and algorithm.unfit(hosts) is None
    ]


def _num_waits(bucket: Bucket, compression: Codec, moment: Moment, chosen: Chosen) -> int:
    """Waits of an exchange that waits once for each step of a sum.

    Several rounds may share a wait, which then lasts as long as the longest; which ones do is unknown, so this is an
    upper bound.
    """
    num_waits = compression.num_waits(bucket, moment)
    sums = (sum(round.sizes) for round in compression.rounds(bucket, moment) if round.kind == "sum")
    steps = [collective.num_steps if (collective := chosen(nbytes)) is not None else 1 for nbytes in sums]
    longest = sorted((max(1, count) for count in steps), reverse=True)[:num_waits]
    return num_waits - len(longest) + sum(longest)


def _sent(round: Round, moment: Moment, chosen: Chosen) -> int:
    """Bytes this rank sends for `round`."""
    collective = chosen(sum(round.sizes)) if round.kind == "sum" and moment.world_size > 1 else None
    if collective is None:
        return round_sent(round, moment.world_size)
    return sum(price(collective, size).sent_bytes[moment.rank] for size in round.sizes)


def _native(nbytes: int) -> None:
    """The backend's own, whatever the size."""


class Everyone:
    """All ranks of a transport, as a Group.

    decoupled: `summed` makes two rounds, of which the second can wait.
    """

    def __init__(self, transport: Transport, what: str, chosen: Chosen = _native, *, decoupled: bool = False) -> None:
        self._transport = transport
        self._what = what
        self._chosen = chosen
        self._is_decoupled = decoupled

    @property
    def size(self) -> int:
        return self._transport.world_size

    @property
    def rank(self) -> int:
        return self._transport.rank

    def sum(self, tensors: tuple[torch.Tensor, ...]) -> Work:
        collective = self._chosen(sum(tensor.nbytes for tensor in tensors))
        if collective is not None:
            return WholeExchange(run(collective, self._transport, tensors, what=self._what))
        works = [self._transport.all_reduce(tensor, what=self._what) for tensor in tensors]
        return works[0] if len(works) == 1 else AllWork(works)

    def summed(self, tensors: tuple[torch.Tensor, ...]) -> Exchange:
        collective = self._chosen(sum(tensor.nbytes for tensor in tensors))
        if not self._is_decoupled:
            yield self.sum(tensors)
        elif collective is None:
            yield from DecoupledSums(self._transport, self, self._what).summed(tensors)
        else:
            first, second = halves_of(collective)
            yield WholeExchange(run(first, self._transport, tensors, what=self._what))
            yield from run(second, self._transport, tensors, what=self._what)

    def gather(self, tensor: torch.Tensor) -> tuple[Work, torch.Tensor]:
        rows = tensor.new_empty((self._transport.world_size, *tensor.shape))
        return self._transport.all_gather(rows, tensor, what=self._what), rows

    def scatter(self, rows: torch.Tensor) -> tuple[Work, torch.Tensor]:
        received = torch.empty_like(rows)
        return self._transport.all_to_all(received, rows, what=self._what), received

    def scatter_uneven(
        self, messages: Sequence[torch.Tensor], lengths: Sequence[int]
    ) -> tuple[Work, list[torch.Tensor]]:
        return messages_among(self._transport, range(self.size), messages, lengths, self._what)

    def swap(self, send: torch.Tensor | None, receive: torch.Tensor | None, peer: int) -> Work:
        sends = [] if send is None else [(peer, send)]
        receives = [] if receive is None else [(peer, receive)]
        return self._transport.send_receive(sends, receives, what=self._what)
