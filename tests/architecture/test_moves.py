"""Moves, which the simulator prices, say the same as the bytes that architectures declare and transports count."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from laconic.architecture import AllReduce, Architecture, Gossip, ParameterServer
from laconic.architecture.contract import NothingMeasured
from laconic.architecture.graphs.topologies import TOPOLOGIES
from laconic.collectives import ALGORITHMS
from laconic.collectives.choice import NATIVE, Costs
from laconic.collectives.hierarchical import from_leaders, to_leaders
from laconic.collectives.price import price
from laconic.collectives.ring import ring
from laconic.collectives.schedule import halves_of
from laconic.compression import Compressor, Int8, NoCompression, PowerSgd, TopK
from laconic.core.exchange import Move
from laconic.core.hosts import Hosts, Pairs, hosts_alone
from laconic.core.moment import Moment
from laconic.core.plan import Bucket, Plan
from laconic.core.sent_bytes import all_gather_sent, all_reduce_sent, shard_exchange_sent
from laconic.core.tensor import TensorSpec
from laconic.errors import AttachError, IllegalCombination, InvalidSetting
from laconic.scheduling import Dear
from laconic.strategy import Strategy
from tests.strategy.generate import changed_wrappers, variants, with_partners

ARCHITECTURES = [method for method in variants("architecture") if isinstance(method, Architecture)]
COMPRESSORS = [method for method in [*variants("compression"), *changed_wrappers()] if isinstance(method, Compressor)]
BUCKETS = [
    Bucket((TensorSpec("a", (31, 47)), TensorSpec("b", (13,)))),
    Bucket((TensorSpec("c", (1,), torch.float16),)),
    Bucket((TensorSpec("d", (300, 20), torch.bfloat16), TensorSpec("e", (64, 64), torch.bfloat16))),
]


def sent(move: Move, rank: int, world_size: int, hosts: Hosts) -> int:
    """Bytes one rank sends for a move, by the price list of transports and by the rows of collectives."""
    hosts = move.groups or hosts
    if move.kind in {"to_leaders", "from_leaders"}:
        rows = to_leaders(hosts) if move.kind == "to_leaders" else from_leaders(hosts)
        return sum(price(rows, size).sent_bytes[rank] for size in move.sizes)
    ranks, place = world_size, rank
    if move.kind in {"scatter_inside", "scatter_between"}:
        members = len(hosts[0]) if move.kind == "scatter_inside" else len(hosts)
        return sum(shard_exchange_sent(size, members) for size in move.sizes)
    if move.among_hosts:
        ranks, leaders = len(hosts), [host[0] for host in hosts]
        if rank not in leaders:
            return 0
        place = leaders.index(rank)
        if move.kind == "sum":
            return sum(price(ring(ranks), size).sent_bytes[place] for size in move.sizes)
    if ranks == 1 and move.kind not in {"serve", "mix"}:
        return 0
    if move.kind in {"serve", "aggregate"}:
        return move.nbytes
    if move.kind == "mix":
        return move.peers * move.nbytes
    if move.kind == "send":
        return move.nbytes
    if move.algorithm != NATIVE:
        collective = ALGORITHMS[move.algorithm](hosts)
        if move.kind == "scatter_sum":  # both halves: a share alone does not say what it is a share of
            return sum(price(half, size).sent_bytes[rank] for half in halves_of(collective) for size in move.sizes)
        if move.kind == "gather":
            return 0
        return sum(price(collective, size).sent_bytes[rank] for size in move.sizes)
    prices = {
        "sum": all_reduce_sent,
        "gather": all_gather_sent,
        "scatter": shard_exchange_sent,
        "scatter_sum": shard_exchange_sent,
    }
    return sum(prices[move.kind](size, ranks) for size in move.sizes)


def places(world_size: int) -> list[Hosts]:
    """Every rank on a host of its own, and two on each."""
    pairs = tuple(tuple(range(first, min(first + 2, world_size))) for first in range(0, world_size, 2))
    return [hosts_alone(world_size), pairs]


class Known(NothingMeasured):
    """Has found these costs, and that even ranks are in one rack and odd ranks in another."""

    def __init__(self, costs: Costs, world_size: int) -> None:
        self._costs, self._world_size = costs, world_size

    def costs(self, algorithms: Sequence[str], hosts: Hosts) -> Costs:
        return self._costs

    def pairs(self) -> Pairs:
        ranks = range(self._world_size)
        return tuple(tuple(4.0 if (one - other) % 2 == 0 else 1.0 for other in ranks) for one in ranks)


def settled(architecture: Architecture, hosts: Hosts) -> Architecture | None:
    """The architecture as it is once attached there; None if it would be refused."""
    # For auto: the ring is clearly faster for what is large, and nothing is for what is small.
    costs = Costs((100, 4000), ((NATIVE, (1.0, 10.0)), ("ring", (1.0, 1.0))))
    try:
        return architecture.settled(lambda: hosts, Known(costs, sum(map(len, hosts))))
    except AttachError:
        return None


def buckets_of(architecture: Architecture, world_size: int) -> list[Bucket]:
    """As they are, or by owner where ranks have shards."""
    if not architecture.holds_shards:
        return BUCKETS
    return [part for bucket in BUCKETS for part in architecture.cut(Plan((bucket,)), world_size, tensors=True).buckets]


def check(architecture: Architecture, compression: Compressor) -> None:
    for world_size in range(1, 5):
        for hosts in places(world_size):
            known = settled(architecture, hosts) or AllReduce()
            codec = Strategy(architecture=known, compression=compression).codec
            for rank in range(world_size):
                moment = Moment.steady(world_size, rank)
                for bucket in buckets_of(known, world_size):
                    moves = known.moves(bucket, codec, moment)
                    assert sum(sent(move, rank, world_size, hosts) for move in moves) == (
                        known.sent_bytes(bucket, codec, moment)
                    ), (moves, moment, hosts)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_moves_of_every_architecture_are_the_bytes_it_declares(architecture: Architecture) -> None:
    for compression in (NoCompression(), Int8(), TopK(route="scatter"), PowerSgd()):
        try:
            Strategy(architecture=architecture, compression=compression)
        except IllegalCombination:
            continue
        check(architecture, compression)


@pytest.mark.slow
@pytest.mark.parametrize("compression", COMPRESSORS, ids=str)
def test_moves_of_every_compressor_are_the_bytes_declared(compression: Compressor) -> None:
    strategies = [with_partners(compression)]
    for architecture in (ParameterServer(shards=2), AllReduce(algorithm="tree")):
        try:
            strategies.append(Strategy(architecture=architecture, compression=compression))
        except IllegalCombination:
            continue
    for strategy in strategies:
        check(strategy.architecture, compression)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_halves_are_the_bytes_declared(architecture: Architecture) -> None:
    for compression in COMPRESSORS:
        try:
            Strategy(architecture=architecture, compression=compression, scheduling=Dear())
        except IllegalCombination:
            continue
        for world_size in range(2, 5):
            for hosts in places(world_size):
                known = settled(architecture, hosts)
                if known is None:
                    continue
                moment = Moment.steady(world_size)
                for bucket in BUCKETS:
                    moves = known.moves(bucket, compression, moment, decoupled=True)
                    kinds = [move.kind for move in moves]
                    assert kinds == ["serve"] or kinds == ["scatter_sum"] * (len(kinds) // 2) + ["gather"] * (
                        len(kinds) // 2
                    )
                    assert sum(sent(move, 0, world_size, hosts) for move in moves) == (
                        known.decoupled_bytes(bucket, compression, moment)
                    )


def test_halves_of_all_reduce_are_two_moves_of_shares() -> None:
    bucket = Bucket((TensorSpec("a", (1000,)),))
    first, second = AllReduce().moves(bucket, NoCompression(), Moment.steady(4), decoupled=True)
    assert (first.kind, second.kind) == ("scatter_sum", "gather")
    assert first.nbytes == 4 * second.nbytes == 4000


@pytest.mark.parametrize("architecture", [one for one in ARCHITECTURES if one.scope == "neighbours"], ids=str)
def test_mixing_names_a_graph_with_as_many_neighbours(architecture: Architecture) -> None:
    (move,) = architecture.moves(BUCKETS[0], NoCompression(), Moment.steady(4))
    assert move.kind == "mix"
    assert move.topology in TOPOLOGIES
    assert move.peers == len(architecture.neighbours(Moment.steady(4)).sends)


def test_a_server_answers_with_what_the_way_back_takes() -> None:
    bucket = Bucket((TensorSpec("a", (4096,)),))
    (move,) = ParameterServer().moves(bucket, Int8(), Moment.steady(4))
    assert move.kind == "serve"
    assert move.nbytes == move.answer_bytes == Int8().payload_bytes(bucket, Moment.steady(4))
    rounds = ParameterServer().moves(Bucket((TensorSpec("m", (64, 64)),)), PowerSgd(), Moment.steady(4))
    assert [move.nbytes for move in rounds] == [64 * 4 * 4, 64 * 4 * 4]
    assert all(move.answer_bytes == move.nbytes for move in rounds)


def test_between_hosts_is_a_sum_inside_what_is_compressed_and_handing_out() -> None:
    architecture = AllReduce(algorithm="hierarchical", compress="between_hosts")
    architecture = architecture.settled(lambda: ((0, 1), (2, 3)), NothingMeasured())
    moves = architecture.moves(BUCKETS[0], Int8(), Moment.steady(4))
    assert [move.kind for move in moves] == ["to_leaders", "gather", "from_leaders"]
    assert [move.among_hosts for move in moves] == [False, True, False]
    assert moves[0].nbytes == moves[-1].nbytes == BUCKETS[0].nbytes


def test_gossip_that_is_placed_sends_to_its_neighbours_in_the_measured_order() -> None:
    placed = Gossip(placement="measured").settled(lambda: hosts_alone(6), Known(Costs((), ()), 6))
    assert placed.facts() == {"groups": "0 2 4 | 1 3 5"}
    ring = [0, 2, 4, 1, 3, 5]
    for place, rank in enumerate(ring):
        around = placed.neighbours(Moment.steady(6, rank))
        assert around.sends == around.receives == tuple(sorted((ring[place - 1], ring[(place + 1) % 6])))
    with pytest.raises(InvalidSetting, match="placement=measured has no effect with topology=random_pairs"):
        Gossip(placement="measured", topology="random_pairs")
