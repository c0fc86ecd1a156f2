"""The contract of an architecture: how a bucket is exchanged, with whom, and its cost in bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, Self

import torch

from laconic.architecture.datagrams.loss_bound import LossBound
from laconic.architecture.graphs.topologies import Neighbourhood
from laconic.architecture.servers.layout import ServerLayout
from laconic.collectives.choice import NATIVE, Costs
from laconic.core.exchange import Exchange, Group, Move, Round, Wire
from laconic.core.hosts import Hosts, Pairs
from laconic.core.moment import Moment
from laconic.core.payload import Payload
from laconic.core.plan import Bucket, Plan
from laconic.core.stateful import BucketState, Resize
from laconic.settings import Method

Scope = Literal["everyone", "neighbours"]
"""everyone: a round ends with the mean over all ranks, the same everywhere. neighbours: with the mean over a few, so
replicas come closer without being equal."""


class Measure(Protocol):
    """Measurements that all ranks make together."""

    def costs(self, algorithms: Sequence[str], hosts: Hosts) -> Costs:
        """The times of all-reduces of several sizes on these hosts, with the backend's own algorithm and with these."""
        ...

    def pairs(self) -> Pairs:
        """How fast every two ranks exchange while all others do the same."""
        ...


class NothingMeasured:
    """A Measure for questions that need no network: whether settings fit these hosts, how many bytes are sent."""

    def costs(self, algorithms: Sequence[str], hosts: Hosts) -> Costs:
        return Costs((1,), ((NATIVE, (0.0,)),))

    def pairs(self) -> Pairs:
        return ()


class CodecTraits(Protocol):
    """The facts about a compressor that an architecture needs."""

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
        """Receivers get exactly the tensor that was sent."""
        ...

    @property
    def tensor_by_tensor(self) -> bool:
        """The decoded values of a tensor do not depend on the others in its bucket."""
        ...

    @property
    def density(self) -> float:
        """The share of values that a payload carries information about."""
        ...

    @property
    def at_random(self) -> bool:
        """The values that a payload is about are drawn at random."""
        ...

    @property
    def by_name(self) -> bool:
        """The bytes of a payload depend on the names of tensors, not on their shapes alone."""
        ...


class Codec(Protocol):
    """The part of a compressor that an architecture uses."""

    @property
    def traits(self) -> CodecTraits:
        """Facts about the compressor."""
        ...

    def is_lossless_for(self, dtype: torch.dtype) -> bool:
        """Whether the payload of a tensor of this dtype is the tensor itself."""
        ...

    def init(self, bucket: Bucket) -> BucketState:
        """The compressor's state for `bucket` before the first step."""
        ...

    def encode(self, flat: torch.Tensor, state: BucketState) -> Payload:
        """The payload of this rank for `flat`."""
        ...

    def encode_rows(self, rows: torch.Tensor, states: Sequence[BucketState]) -> Payload:
        """Stacked payloads, one for each row; the states, one for each row too, are of tensors with the same shapes."""
        ...

    def decode(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """Decode `payload` into `out`."""
        ...

    def add_decoded(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """Decode `payload` and add it to `out`."""
        ...

    def decode_rows(self, payloads: Payload, outs: torch.Tensor, state: BucketState) -> None:
        """Decode stacked payloads, one into each row of `outs`."""
        ...

    def sum_decoded_rows(self, payloads: Payload, out: torch.Tensor, state: BucketState) -> None:
        """Fill `out` with the sum of the stacked payloads, added up one after the other."""
        ...

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """Replace `flat` by its sum over the group."""
        ...

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """The rounds of one exchange."""
        ...

    def payload_bytes(self, bucket: Bucket, moment: Moment) -> int:
        """Bytes of the payload that `encode` returns."""
        ...

    @property
    def between_hosts(self) -> Codec | None:
        """The compressor for sums between hosts, if it is another one."""
        ...

    def num_waits(self, bucket: Bucket, moment: Moment) -> int:
        """The number of waits of one exchange."""
        ...

    def back(self) -> Codec:
        """The compressor for sums that are sent back."""
        ...

    def one_by_one(self) -> Codec:
        """The same where payloads are gathered."""
        ...


@dataclass(frozen=True, kw_only=True)
class Architecture(Method):
    """WITH WHOM a replica averages."""

    axis: ClassVar[str] = "architecture"
    scope: ClassVar[Scope]
    """The ranks over which an exchange takes the mean."""
    asynchronous: ClassVar[bool] = False
    """Works without a barrier."""
    mixes_anything: ClassVar[bool] = False
    """An exchange among neighbours gives each the mean of their values, whether parameters or other values."""
    keeps_clocks: ClassVar[bool] = False
    """Keeps the step of every worker, and can make the fastest wait."""
    compensates: ClassVar[bool] = False
    """Corrects the losses of compression by itself, so it takes any compressor that can be decoded alone, except those
    that keep a residual."""
    adds_differences: ClassVar[bool] = False
    """Sends differences of neighbours' parameters through a linear compressor, whose state is kept per neighbour, as
    "field|place". The lost part of a difference remains for the next round."""
    follows_steps: ClassVar[bool] = False
    """Parameters must be corrected after every optimizer step."""
    fields: ClassVar[Mapping[str, Resize]] = {}
    """Its state per element, and how each field is converted when the number of workers changes."""
    weight_field: ClassVar[str | None] = None
    """The field with a replica's weight in the mean that mixing preserves; None: all have the same weight."""
    holds_shards: ClassVar[bool] = False
    """Each rank holds a shard of every parameter: a round gives it the mean of that shard only, and `gather` gathers
    shards for each pass."""
    adds_only: ClassVar[bool] = False
    """Its servers add up integers and read no payload, so every round of a compressor must be a sum."""
    rounds_by_bucket: ClassVar[bool] = False
    """The last bits of a mean depend on which parameters share a bucket, even with two ranks."""
    only_speed: ClassVar[tuple[str, ...]] = ()
    """Settings that say how or where sums are formed, and change no result but its rounding."""

    @property
    def servers(self) -> ServerLayout | None:
        """The servers that workers exchange with; None: workers exchange with each other."""
        return None

    @property
    def has_servers(self) -> bool:
        """Whether servers hold common state."""
        return self.servers is not None

    @property
    def loss_bound(self) -> LossBound | None:
        """How much of the values may be missing from a mean, where they are sent as datagrams; None: they are not."""
        return None

    def copy_rate(self, compression: CodecTraits) -> float | None:
        """The step towards a neighbour's public copy when a pair averages without a barrier, with this compressor.

        None: there are no public copies, and pairs exchange uncompressed parameters.
        """
        return None

    @property
    def weights_by(self) -> str:
        """The compressor of weights when shards are gathered, where `holds_shards`."""
        return "none"

    @property
    def between_by(self) -> str | None:
        """The compressor of sums between hosts; None: there are no such sums."""
        return None

    def settled(self, hosts: Callable[[], Hosts], measure: Measure) -> Self:
        """This architecture with facts known only when attaching: which ranks share a host, and measurements.

        Every rank calls it, and either all ranks call `hosts` and `measure` or none does. Raises AttachError if a
        setting would have no effect on these hosts.
        """
        return self

    def facts(self) -> dict[str, str]:
        """The facts found when attaching, for the event log."""
        return {}

    def tells_hosts_apart(self) -> bool:
        """Whether the routes of messages depend on which ranks share a host."""
        return False

    def meets_the_same(self) -> bool:
        """Whether neighbours are the same in every mixing step."""
        return True

    def forms_sums(self) -> bool:
        """Whether a setting decides how sums are formed, which has no effect if nothing is summed."""
        return False

    def compresses_sums(self) -> bool:
        """Whether contributions of several ranks are added up before they are compressed."""
        return False

    def neighbours(self, moment: Moment) -> Neighbourhood:
        """The ranks that this rank exchanges with, if these are only some."""
        raise NotImplementedError

    def share(self, world_size: int) -> float:
        """The factor of a contribution before it is exchanged."""
        return 1.0 / world_size if self.scope == "everyone" else 1.0

    def cut(self, plan: Plan, world_size: int, *, tensors: bool) -> Plan:
        """The plan with its buckets cut so that each can take its own route; with `tensors`, inside tensors too."""
        return plan

    def fixed_ranks(self, least: int, most: int) -> str | None:
        """Why the set of ranks cannot change from one exchange to the next, within these numbers; None: it can."""
        return f"{self.name} does not support a changing set of ranks"

    def init(self, compression: Codec, bucket: Bucket) -> BucketState:
        """The compressor's state for a bucket before the first step."""
        return compression.init(bucket)

    def begin(self, state: BucketState, parameters: torch.Tensor) -> None:
        """Add state for a bucket; `parameters` are the common initial values."""

    def follow_step(self, state: BucketState, parameters: torch.Tensor) -> None:
        """Correct `parameters`, as the optimizer has left them; called where `follows_steps`, with no round open."""

    def exchange(
        self, flat: torch.Tensor, state: BucketState, compression: Codec, wire: Wire, own: torch.Tensor | None = None
    ) -> Exchange:
        """Replace `flat` by its mean, contributions being scaled by `share`.

        own: filled with this rank's contribution to the mean, from which a wrapper computes what was lost.
        """
        raise NotImplementedError

    def sent_bytes(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """Payload bytes one rank sends for one exchange of `bucket`, without running it."""
        raise NotImplementedError

    def sent_between(self, bucket: Bucket, compression: Codec, moment: Moment) -> int | None:
        """The part of `sent_bytes` that goes to other hosts, where ranks of a host add up first; None: unknown."""
        return None

    def moves(self, bucket: Bucket, compression: Codec, moment: Moment, *, decoupled: bool = False) -> tuple[Move, ...]:
        """The moves of one exchange of `bucket` on the network, in order.

        If decoupled, a sum is a "scatter_sum" and a "gather", and every gather may be deferred.
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
        """Fill `rows` with the decoded `row` of each rank, including this rank's own."""
        raise NotImplementedError

    def init_weights(self, compression: Codec, weights: Bucket, world_size: int) -> BucketState:
        """The compressor's state for this rank's row of weights; nothing is kept between steps."""
        raise NotImplementedError

    def gathered_bytes(self, weights: Bucket, compression: Codec, moment: Moment) -> int:
        """Payload bytes one rank sends for one gather of weights, where `holds_shards`."""
        raise NotImplementedError

    def gather_moves(self, weights: Bucket, compression: Codec, moment: Moment) -> tuple[Move, ...]:
        """The moves of one gather of weights."""
        raise NotImplementedError

    def decoupled_bytes(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """As `sent_bytes`, where sums are formed in two rounds."""
        return self.sent_bytes(bucket, compression, moment)

    def pairwise_bytes(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """Payload bytes one rank sends for `bucket` per step when pairs average without a barrier, at most on average.

        Each replica starts one exchange per step and answers one of another replica.
        """
        return 2 * compression.payload_bytes(bucket, moment)

    def num_waits(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """The number of waits of one exchange of `bucket`."""
        return 1
