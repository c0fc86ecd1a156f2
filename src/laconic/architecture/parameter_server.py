"""Workers exchange with servers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch

from laconic.architecture.contract import Architecture, Codec, Measure, Scope
from laconic.architecture.servers.exchange import bytes_to_server, moves_to_server, sum_at_server, waits_for_server
from laconic.architecture.servers.layout import ServerLayout
from laconic.architecture.servers.shares import in_words, server_shares
from laconic.core.exchange import Exchange, Move, Wire
from laconic.core.hosts import Hosts
from laconic.core.moment import Moment
from laconic.core.plan import Bucket, Plan
from laconic.core.stateful import BucketState
from laconic.core.tensor import TensorSpec
from laconic.errors import InvalidSetting
from laconic.settings import choice, count, hosts

_MEASURED = "measured"
_SMALLEST_BYTES = 65536
"""Buckets are not cut into pieces below this size: each piece is a message."""


@dataclass(frozen=True, kw_only=True)
class ParameterServer(Architecture):
    """Servers form the mean, or hold the parameters, each of them for some of the buckets.

        bsp, local   a server decodes the payloads of all workers, adds them up and sends the encoded sum back
        ssp, asp     a server applies each worker's gradient with the optimizer and sends the parameters back;
                     with async_diloco, each worker's change of parameters over several steps

    A worker sends and receives N bytes, a server n N / m each way, or another share where links were measured. With
    error_feedback both directions have a residual of their own. Servers are child processes of the workers, or run
    where `laconic serve` was called.

    Reference: Li et al. 2014 (parameter server), OSDI; Tang et al. 2019 (two-sided error feedback), arXiv:1905.05957.
    """

    name: ClassVar[str] = "parameter_server"
    scope: ClassVar[Scope] = "everyone"
    asynchronous: ClassVar[bool] = True
    keeps_clocks: ClassVar[bool] = True
    only_speed: ClassVar[tuple[str, ...]] = ("shards", "hosts", "placement")
    shows_on_links: ClassVar[tuple[str, ...]] = ("placement",)

    shards: int = count(0, at_most=4096)
    """Number of servers, each with about the same number of bytes; 0: one per worker."""
    hosts: str = hosts("")
    """Addresses of running servers, as address:port separated by |; empty: the workers start them."""

    placement: str = choice("evenly", _MEASURED)
    """How many bytes each server gets; evenly: all the same; measured: the more, the faster its host exchanges with the
    others, so that a host behind a slow link gets few or none."""

    shares: tuple[float, ...] = ()
    """The share of each server, once links have been measured; none: equal shares."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.placement == _MEASURED and (self.hosts or self.shards):
            other = "hosts" if self.hosts else "shards"
            raise InvalidSetting(
                f"{self.axis}.{self.name}.placement={_MEASURED} needs one server on the host of every worker. Leave "
                f"out {other}, or leave out placement."
            )
        if self.hosts and self.shards:
            raise InvalidSetting(
                f"{self.axis}.{self.name}: shards={self.shards} has no effect together with hosts, each of which is a "
                "server. Give one of them."
            )

    @property
    def servers(self) -> ServerLayout:
        """As many servers as there are hosts or shards."""
        by_links = self.placement == _MEASURED
        return ServerLayout(shards=self.shards, hosts=self.hosts, by_links=by_links, shares=self.shares)

    def settled(self, hosts: Callable[[], Hosts], measure: Measure) -> ParameterServer:
        """This architecture with the shares of servers, if they follow from measured links."""
        if self.placement != _MEASURED or sum(map(len, hosts())) == 1:
            return self
        pairs = measure.pairs()
        return replace(self, shares=server_shares(pairs)) if pairs else self

    def facts(self) -> dict[str, str]:
        """The share of each server, where it follows from measured links."""
        return {"shares": in_words(self.shares)} if self.shares else {}

    def cut(self, plan: Plan, world_size: int, *, tensors: bool) -> Plan:
        """Buckets in as many pieces as there are servers, each with as many bytes as its server is to get."""
        pieces: list[Bucket] = []
        for bucket in plan.buckets:
            pieces += _pieces(bucket, self.servers.cuts(bucket.nbytes, world_size, _SMALLEST_BYTES), tensors=tensors)
        return replace(plan, buckets=tuple(pieces))

    def exchange(
        self, flat: torch.Tensor, state: BucketState, compression: Codec, wire: Wire, own: torch.Tensor | None = None
    ) -> Exchange:
        """Send this rank's payload, get the sum of all; in several rounds where the compressor needs them."""
        return sum_at_server(flat, state, compression, wire, own)

    def sent_bytes(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """One payload, or the bytes that each round sums."""
        return bytes_to_server(bucket, compression, moment)

    def moves(self, bucket: Bucket, compression: Codec, moment: Moment, *, decoupled: bool = False) -> tuple[Move, ...]:
        """To the server and back, once or as often as the compressor has rounds."""
        return tuple(replace(move, shares=self.shares) for move in moves_to_server(bucket, compression, moment))

    def num_waits(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """One wait, or those of the compressor."""
        return waits_for_server(bucket, compression, moment)


def _pieces(bucket: Bucket, cuts: list[int], *, tensors: bool) -> list[Bucket]:
    groups: dict[int, list[TensorSpec]] = {}
    begin = 0
    for tensor in bucket.tensors:
        ends = [cut - begin for cut in cuts] if tensors else []
        # A cut that leaves a small rest on either side is not worth a message of its own.
        inside = [end for end in ends if _SMALLEST_BYTES <= end <= tensor.nbytes - _SMALLEST_BYTES]
        for first, last in pairwise([0, *(end // tensor.dtype.itemsize for end in inside), tensor.numel]):
            part = tensor.piece(first, last)
            middle = begin + part.nbytes / 2
            groups.setdefault(bisect_right(cuts, middle), []).append(part)
            begin += part.nbytes
    return [Bucket(tuple(group)) for group in groups.values()]
