"""What an architecture promises: to exchange a bucket with whom it says, and what that costs in bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, Self

import torch

from laconic.architecture.graphs.topologies import Neighbourhood
from laconic.architecture.servers.layout import ServerLayout
from laconic.collectives.choice import Costs
from laconic.core.exchange import Exchange, Group, Move, Round, Wire
from laconic.core.hosts import Hosts
from laconic.core.moment import Moment
from laconic.core.payload import Payload
from laconic.core.plan import Bucket, Plan
from laconic.core.stateful import BucketState, Resize
from laconic.settings import Method

Scope = Literal["everyone", "neighbours"]
"""everyone: a round ends with the mean over all, the same everywhere. neighbours: with that over a few, so replicas
come closer without being equal."""

Measure = Callable[[Sequence[str]], Costs]
"""Finds out how long all-reduces of several sizes take with the backend's own algorithm and with these."""


class CodecTraits(Protocol):
    """The facts about a compressor that an architecture asks for."""

    @property
    def decodes_alone(self) -> bool:
        """One rank's payload can be decoded without the others'."""
        ...

    @property
    def sums_only(self) -> bool:
        """Every round of an exchange is a sum."""
        ...

    @property
    def lossless(self) -> bool:
        """Receivers get exactly what was sent."""
        ...


class Codec(Protocol):
    """What an architecture needs to know of a compressor."""

    @property
    def traits(self) -> CodecTraits:
        """Facts about it."""
        ...

    def init(self, bucket: Bucket) -> BucketState:
        """What it remembers about `bucket` before the first step."""
        ...

    def encode(self, flat: torch.Tensor, state: BucketState) -> Payload:
        """What this rank sends for `flat`."""
        ...

    def decode(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """Write what `payload` stands for into `out`."""
        ...

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """Replace `flat` by its sum over the group."""
        ...

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """What one exchange sends."""
        ...

    def payload_bytes(self, bucket: Bucket, moment: Moment) -> int:
        """Bytes of what `encode` gives."""
        ...

    def num_waits(self, bucket: Bucket, moment: Moment) -> int:
        """How often one exchange yields."""
        ...

    def back(self) -> Codec:
        """How a sum is sent back."""
        ...

    def one_by_one(self) -> Codec:
        """The same where each payload is read by itself."""
        ...


@dataclass(frozen=True, kw_only=True)
class Architecture(Method):
    """WITH WHOM a replica averages."""

    axis: ClassVar[str] = "architecture"
    scope: ClassVar[Scope]
    """Over whom a round takes the mean."""
    asynchronous: ClassVar[bool] = False
    """Can go on without a barrier."""
    keeps_clocks: ClassVar[bool] = False
    """Knows how far every worker is, and can make the fastest wait."""
    compensates: ClassVar[bool] = False
    """Makes up for what compression loses by itself, so it takes any compressor that can be read alone, and none that
    keeps a residual of its own."""
    follows_steps: ClassVar[bool] = False
    """What the optimizer does to parameters must be corrected after every step."""
    fields: ClassVar[Mapping[str, Resize]] = {}
    """What it remembers per element, and what becomes of that when the number of workers changes."""
    weight_field: ClassVar[str | None] = None
    """The field that says how much a replica counts in the mean which mixing preserves; None: all count the same."""
    holds_shards: ClassVar[bool] = False
    """Each rank holds a shard of every parameter: a round leaves it with the mean of that shard alone, and shards are
    put together for each pass, which `gather` does."""
    only_speed: ClassVar[tuple[str, ...]] = ()
    """Settings that say how or where sums are formed, and change no result but its rounding."""

    @property
    def servers(self) -> ServerLayout | None:
        """The servers that workers send to and get back from; None: workers exchange with each other."""
        return None

    @property
    def has_servers(self) -> bool:
        """Whether something beside the workers holds common state."""
        return self.servers is not None

    @property
    def copy_rate(self) -> float | None:
        """How far a replica moves towards its neighbours' public copies when a pair averages without a barrier.

        None: there are no public copies, and pairs exchange parameters as they are.
        """
        return None

    @property
    def weights_by(self) -> str:
        """The compressor by which shards of parameters travel when they are put together, where `holds_shards`."""
        return "none"

    def settled(self, hosts: Callable[[], Hosts], measure: Measure) -> Self:
        """The same, knowing what only attaching tells: which ranks share a host, and how long algorithms take.

        Every rank calls it; all ranks ask `hosts` and `measure`, or none. Raises AttachError if a setting would have no
        effect on these hosts.
        """
        return self

    def facts(self) -> dict[str, str]:
        """What attaching has told, for the event log."""
        return {}

    def tells_hosts_apart(self) -> bool:
        """Whether who sends to whom depends on which ranks share a host."""
        return False

    def meets_the_same(self) -> bool:
        """Whether neighbours are the same in every round."""
        return True

    def forms_sums(self) -> bool:
        """Whether it has its own way to form sums, which is of no use where nothing is summed."""
        return False

    def compresses_sums(self) -> bool:
        """Whether contributions of several ranks are added up before they are compressed."""
        return False

    def neighbours(self, moment: Moment) -> Neighbourhood:
        """Whom this rank talks to, if only to some."""
        raise NotImplementedError

    def share(self, world_size: int) -> float:
        """What a contribution is multiplied by before it is exchanged."""
        return 1.0 / world_size if self.scope == "everyone" else 1.0

    def cut(self, plan: Plan, world_size: int, *, tensors: bool) -> Plan:
        """The plan with its buckets cut so that each can go its own way; with `tensors`, inside tensors too."""
        return plan

    def init(self, compression: Codec, bucket: Bucket) -> BucketState:
        """What compression remembers about a bucket before the first step."""
        return compression.init(bucket)

    def begin(self, state: BucketState, parameters: torch.Tensor) -> None:
        """Add what is remembered about a bucket; `parameters` are the values all replicas start from."""

    def follow_step(self, state: BucketState, parameters: torch.Tensor) -> None:
        """Correct `parameters`, as the optimizer has left them; called where `follows_steps`, with no round open."""

    def exchange(
        self, flat: torch.Tensor, state: BucketState, compression: Codec, wire: Wire, own: torch.Tensor | None = None
    ) -> Exchange:
        """Replace `flat` by its mean, contributions being scaled by `share`.

        own: filled with what this rank contributed to the mean, for whoever needs to know what was lost.
        """
        raise NotImplementedError

    def sent_bytes(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """Payload bytes one rank sends for one exchange of `bucket`, without running it."""
        raise NotImplementedError

    def moves(self, bucket: Bucket, compression: Codec, moment: Moment, *, halves: bool = False) -> tuple[Move, ...]:
        """What one exchange of `bucket` does on the network, in order.

        With `halves`, a sum is a "scatter_sum" and a "gather", and all that gathers may wait.
        """
        raise NotImplementedError

    def scatter(
        self, rows: torch.Tensor, state: BucketState, compression: Codec, wire: Wire, out: torch.Tensor
    ) -> Exchange:
        """Fill `out` with the sum over all ranks of this rank's row of `rows`, where `holds_shards`."""
        raise NotImplementedError

    def gather(
        self, row: torch.Tensor, state: BucketState, compression: Codec, wire: Wire, rows: torch.Tensor
    ) -> Exchange:
        """Fill `rows` with what everybody gets of each rank's `row`, of this rank's own too."""
        raise NotImplementedError

    def init_weights(self, compression: Codec, weights: Bucket, world_size: int) -> BucketState:
        """What compression needs to know about this rank's row of weights; nothing that lasts."""
        raise NotImplementedError

    def gathered_bytes(self, weights: Bucket, compression: Codec, moment: Moment) -> int:
        """Payload bytes one rank sends when shards of parameters are put together once, where `holds_shards`."""
        raise NotImplementedError

    def gather_moves(self, weights: Bucket, compression: Codec, moment: Moment) -> tuple[Move, ...]:
        """What that does on the network."""
        raise NotImplementedError

    def halves_bytes(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """The same where sums are formed in two rounds."""
        return self.sent_bytes(bucket, compression, moment)

    def pairwise_bytes(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """Payload bytes one rank sends for `bucket` per step when pairs average without a barrier, at most on average.

        Each begins one exchange per step and answers one of somebody else's.
        """
        return 2 * compression.payload_bytes(bucket, moment)

    def num_waits(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """How often one exchange of `bucket` yields."""
        return 1
