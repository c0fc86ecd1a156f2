"""An aggregator on the path sums the payloads of all workers, frame by frame."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.architecture.contract import Architecture, Codec, Scope
from laconic.architecture.servers.exchange import sum_rounds_at_server
from laconic.architecture.servers.layout import ServerLayout
from laconic.core.exchange import Exchange, Move, Wire
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.errors import InvalidSetting
from laconic.settings import count, hosts


@dataclass(frozen=True, kw_only=True)
class InNetwork(Architecture):
    """Each worker sends its bytes once to an aggregator, which adds integers on a shared scale and returns the sum.

        sent by a worker   N              a ring sends 2 (n-1)/n N
        memory             2 S frames     S slots of 1440 bytes, whatever N is

    Integers are added, so all workers get the same bits in any order. Codes of compressors that send integers (intsgd,
    thc) are added unchanged; floating-point values are sent as integers of the same width, on a scale that workers
    agree on for each 1024 bytes. In the lab the aggregator runs on the virtual switch. A server that has no slots left
    forms the same sums of whole tensors instead.

    Reference: Sapio et al. 2021 (SwitchML), NSDI; Lao et al. 2021 (ATP), NSDI.
    """

    name: ClassVar[str] = "in_network"
    scope: ClassVar[Scope] = "everyone"
    adds_only: ClassVar[bool] = True
    only_speed: ClassVar[tuple[str, ...]] = ("slots", "hosts")

    slots: int = count(512, at_least=1, at_most=1 << 16)
    """Frames of 1440 bytes that a worker may have in flight: at least bandwidth times round trip / 1440 bytes."""
    hosts: str = hosts("")
    """Address of the aggregator, as address:port; empty: rank 0 starts it, in the lab on the virtual switch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if "|" in self.hosts:
            raise InvalidSetting(
                f'{self.axis}.{self.name}.hosts is one address: a sum is formed in one place; got "{self.hosts}".'
            )

    @property
    def servers(self) -> ServerLayout:
        """One server, with slots."""
        return ServerLayout(shards=1, hosts=self.hosts, slots=self.slots)

    def exchange(
        self, flat: torch.Tensor, state: BucketState, compression: Codec, wire: Wire, own: torch.Tensor | None = None
    ) -> Exchange:
        """The rounds of the compressor, each of them a sum."""
        return sum_rounds_at_server(flat, state, compression, wire, own)

    def sent_bytes(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """The bytes that each round sums."""
        if moment.world_size == 1:
            return 0
        return sum(size for round in compression.rounds(bucket, moment) for size in round.sizes)

    def moves(self, bucket: Bucket, compression: Codec, moment: Moment, *, decoupled: bool = False) -> tuple[Move, ...]:
        """To the aggregator and back, as often as the compressor has rounds."""
        rounds = compression.rounds(bucket, moment)
        return tuple(Move("aggregate", round.sizes, slots=self.slots) for round in rounds)

    def num_waits(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """The waits of the compressor."""
        return compression.num_waits(bucket, moment)
