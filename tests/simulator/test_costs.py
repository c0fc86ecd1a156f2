"""Costs on an ideal network are those of the textbook; at flow level the same, and more where links are shared."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.architecture import Gossip, ParameterServer
from laconic.architecture.graphs.topologies import TOPOLOGIES
from laconic.cluster import Cluster, Curve, FatTree, Link, Measured, Racks, Rail
from laconic.collectives import ALGORITHMS
from laconic.collectives.price import price
from laconic.collectives.schedule import halves_of
from laconic.compression import GTopK, NoCompression, TopK
from laconic.core.exchange import Move
from laconic.core.hosts import hosts_alone
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.errors import UsageError
from laconic.simulator.lowering.phases import phases_of
from laconic.simulator.lowering.task_graph import Inputs, RankClass
from laconic.simulator.network import LINK, Network
from laconic.simulator.network.analytic import AnalyticNetwork
from laconic.simulator.network.contract import INSIDE, seconds
from laconic.simulator.network.flow import FlowNetwork
from laconic.strategy import Strategy
from tests.simulator.jobs import RATE, hosts, job

ALPHA_S = 2 * 30e-6 + 5e-6
"""Of a message on `ideal`: two links, and software."""
NBYTES = 1 << 24
every_size = pytest.mark.parametrize("size", [*range(2, 10), 15, 16, 17, 31, 32, 33, 48, 63, 64])
NETWORKS: list[type[AnalyticNetwork] | type[FlowNetwork]] = [AnalyticNetwork, FlowNetwork]
both = pytest.mark.parametrize("kind", NETWORKS)


def ideal(size: int, kind: type[AnalyticNetwork] | type[FlowNetwork] = AnalyticNetwork) -> Network:
    return kind(hosts(size, delay_s=30e-6), message_s=5e-6)


def takes(num_steps: float, nbytes: float) -> float:
    return pytest.approx(num_steps * ALPHA_S + nbytes / RATE, rel=1e-5)


# -- formulas ----------------------------------------------------------------------------------------------------


@both
@every_size
def test_ring(kind, size: int) -> None:
    found = seconds(ideal(size, kind), Move("sum", (NBYTES,), "ring"), size)
    assert found == takes(2 * (size - 1), 2 * (size - 1) / size * NBYTES)


@both
@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64])
def test_halving_doubling_of_a_power_of_two(kind, size: int) -> None:
    found = seconds(ideal(size, kind), Move("sum", (NBYTES,), "halving_doubling"), size)
    assert found == takes(2 * math.log2(size), 2 * (size - 1) / size * NBYTES)


@both
@every_size
def test_tree(kind, size: int) -> None:
    depth = math.ceil(math.log2(size))
    found = seconds(ideal(size, kind), Move("sum", (NBYTES,), "tree"), size)
    assert found == takes(2 * depth, 2 * depth * NBYTES)


@pytest.mark.parametrize("side", [2, 3, 4, 5, 6, 7, 8])
@both
def test_torus2d_of_a_square(kind, side: int) -> None:
    size = side**2
    found = seconds(ideal(size, kind), Move("sum", (NBYTES,), "torus2d"), size)
    assert found == takes(4 * (side - 1), 2 * (size - 1) / size * NBYTES)


@pytest.mark.parametrize("size", [*range(5, 18), 31, 32, 33, 48, 63, 64])
def test_double_tree_is_about_two_trees_of_halves(size: int) -> None:
    """2 log2(n) latencies and a few; of the bytes, each half up and down in four pieces that follow each other."""
    depth = math.ceil(math.log2(size))
    assert seconds(ideal(size), Move("sum", (NBYTES,), "double_tree"), size) == takes(
        2 * depth + 3, (1.125 + depth / 2) * NBYTES
    )


@both
@every_size
def test_native_is_the_faster_of_a_ring_and_pipelined_trees(kind, size: int) -> None:
    depth = math.ceil(math.log2(size))
    for nbytes in (64, NBYTES):
        ring_s = 2 * (size - 1) * ALPHA_S + 2 * (size - 1) / size * nbytes / RATE
        trees_s = 2 * depth * ALPHA_S + 2 * nbytes / RATE
        assert seconds(ideal(size, kind), Move("sum", (nbytes,)), size) == pytest.approx(min(ring_s, trees_s), rel=1e-5)


def exchange_s(network: Network, strategy: Strategy, nbytes: int, size: int) -> float:
    """How long one exchange of a bucket takes by itself."""
    inputs = Inputs(
        strategy=strategy,
        workload=job((0, 0, 4)),
        world_size=size,
        network=network,
        classes=(RankClass(size),),
        codec=None,
        moment=Moment.steady(size),
    )
    bucket = Bucket((TensorSpec("w", (nbytes // 4,)),))
    return sum(phase.portion * inputs.seconds(move) for phase in phases_of(inputs, bucket) for move in phase.moves)


@both
@every_size
def test_topk_by_all_gather(kind, size: int) -> None:
    compression = TopK(density=0.01, route="gather")
    bucket = Bucket((TensorSpec("w", (NBYTES // 4,)),))
    payload = compression.payload_bytes(bucket, Moment.steady(size))
    assert payload <= 2 * 4 * (0.01 * NBYTES / 4 + 1), "an index and a value for each"
    found = exchange_s(ideal(size, kind), Strategy(compression=compression), NBYTES, size)
    assert found == takes(math.ceil(math.log2(size)), (size - 1) * payload)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64])
def test_gtopk(size: int) -> None:
    compression = GTopK(density=0.01)
    bucket = Bucket((TensorSpec("w", (NBYTES // 4,)),))
    (first, *rest) = compression.rounds(bucket, Moment.steady(size))
    assert len(rest) == math.log2(size) - 1
    found = exchange_s(ideal(size), Strategy(compression=compression), NBYTES, size)
    assert found == takes(math.log2(size), math.log2(size) * sum(first.sizes))


def test_gtopk_of_ranks_without_a_pair_has_a_round_before_and_one_after() -> None:
    compression, bucket = GTopK(density=0.01), Bucket((TensorSpec("w", (NBYTES // 4,)),))
    *merges, answer = (sum(round.sizes) for round in compression.rounds(bucket, Moment.steady(5)))
    found = exchange_s(ideal(5), Strategy(compression=compression), NBYTES, 5)
    assert found == takes(4, merges[0] + sum(merges) + answer)


@every_size
@pytest.mark.parametrize("shards", [1, 2, 3, 64])
def test_servers_on_hosts_of_their_own(size: int, shards: int) -> None:
    """Two latencies; server 2 n N / m, worker 2 N, whichever is more."""
    architecture = ParameterServer(hosts="|".join(f"10.0.0.{number}:1" for number in range(1, shards + 1)))
    (move,) = architecture.moves(Bucket((TensorSpec("w", (NBYTES // 4,)),)), NoCompression(), Moment.steady(size))
    assert seconds(ideal(size), move, size, -shards) == takes(2, 2 * max(size / shards, 1) * NBYTES)


@both
@every_size
def test_servers_beside_workers(kind, size: int) -> None:
    """The same, less what stays on a host."""
    for shards in sorted({1, 2, size}):
        move = Move("serve", (NBYTES,), answer_bytes=NBYTES // 2)
        servers, worker = (size - 1) / shards, 1.0 if shards < size else (size - 1) / size
        found = seconds(ideal(size, kind), move, size, shards)
        assert found == takes(2, 1.5 * max(servers, worker) * NBYTES)


@both
@pytest.mark.parametrize("topology", ["ring", "torus", "exponential", "one_peer_exponential"])
@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 16, 33, 64])
def test_gossip_costs_as_many_latencies_and_bytes_as_it_has_peers(kind, topology: str, size: int) -> None:
    (move,) = Gossip(topology=topology).moves(
        Bucket((TensorSpec("w", (NBYTES // 4,)),)), NoCompression(), Moment.steady(size)
    )
    assert move.peers == len(TOPOLOGIES[topology].neighbourhood(0, size, 0, 0).sends)
    assert seconds(ideal(size, kind), move, size) == takes(move.peers, move.peers * NBYTES)


@both
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_random_pairs_cost_one_message_also_for_whoever_is_left_alone(kind, size: int) -> None:
    move = Move("mix", (NBYTES,), peers=0, topology="random_pairs")
    assert seconds(ideal(size, kind), move, size) == takes(1, NBYTES)


@both
@every_size
def test_what_goes_to_all_and_what_goes_to_one(kind, size: int) -> None:
    network = ideal(size, kind)
    assert seconds(network, Move("scatter", (NBYTES,)), size) == takes(1, (size - 1) / size * NBYTES)
    assert seconds(network, Move("send", (NBYTES,)), size) == takes(1, NBYTES)


@both
@every_size
def test_both_halves_are_the_sum(kind, size: int) -> None:
    network, depth = ideal(size, kind), (size - 1).bit_length()
    half = takes(depth, (size - 1) / size * NBYTES)
    assert seconds(network, Move("scatter_sum", (NBYTES,)), size) == half
    assert seconds(network, Move("gather", (NBYTES // size,)), size) == half
    for algorithm in ALGORITHMS:
        if algorithm == "hierarchical":
            continue
        halves = (Move("scatter_sum", (NBYTES,), algorithm), Move("gather", (-(-NBYTES // size),), algorithm))
        whole_s = seconds(network, Move("sum", (NBYTES,), algorithm), size)
        assert sum(seconds(network, move, size) for move in halves) == pytest.approx(whole_s, rel=1e-4)


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8, 9, 16, 31])
@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "hierarchical"])
def test_the_first_half_is_as_long_as_its_rows(algorithm: str, size: int) -> None:
    first, _ = halves_of(ALGORITHMS[algorithm](hosts_alone(size)))
    rows = price(first, NBYTES)
    expected_s = rows.num_steps * ALPHA_S + rows.serial_bytes / RATE
    found = seconds(ideal(size), Move("scatter_sum", (NBYTES,), algorithm), size)
    # Of two trees it is not known exactly how many bytes go down while others go up.
    assert found == pytest.approx(expected_s, rel=0.3 if algorithm == "double_tree" else 1e-4)


@both
def test_nothing_is_sent_among_one(kind) -> None:
    network = ideal(1, kind)
    for move in (
        Move("sum", (100,)),
        Move("gather", (100,)),
        Move("scatter", (100,)),
        Move("mix", (100,), peers=0, topology="ring"),
        Move("scatter_sum", (100,)),
        Move("to_leaders", (100,)),
        Move("scatter_inside", (100,)),
        Move("scatter_between", (100,)),
        Move("sum", (100,), among_hosts=True),
    ):
        assert network.passages(move, 1, 0) == ()
    assert seconds(network, Move("serve", (100,), answer_bytes=100), 1, 1) == pytest.approx(2 * 5e-6), "software alone"


# -- hosts with several devices ----------------------------------------------------------------------------------


def boxes(num_hosts: int, devices: int, nics: int = 1) -> Cluster:
    return Cluster(
        links=(Link(bandwidth_bps=8 * RATE, delay_s=30e-6),) * num_hosts,
        devices_per_host=devices,
        inside=Link(bandwidth_bps=80 * RATE, delay_s=1e-6),
        nics=nics,
        topology=Rail() if nics > 1 else Cluster.uniform(1, Link(bandwidth_bps=1e9)).topology,
    )


@both
@pytest.mark.parametrize(("num_hosts", "devices"), [(2, 2), (4, 2), (3, 4), (2, 8)])
def test_hierarchical_sums_inside_and_between_hosts(kind, num_hosts: int, devices: int) -> None:
    size = num_hosts * devices
    found = seconds(kind(boxes(num_hosts, devices)), Move("sum", (NBYTES,), "hierarchical"), size)
    inside_s = 2 * (devices - 1) * (2 * 1e-6) + 2 * (devices - 1) / devices * NBYTES / (10 * RATE)
    # The ranks of a host share its link, each with its part; every message crosses two buses and two links.
    between_s = 2 * (num_hosts - 1) * (2 * 31e-6) + 2 * (num_hosts - 1) / num_hosts * NBYTES / RATE
    assert found == pytest.approx(inside_s + between_s, rel=1e-4)


@both
def test_hierarchical_uses_every_nic(kind) -> None:
    one = seconds(kind(boxes(4, 4)), Move("sum", (NBYTES,), "hierarchical"), 16)
    four = seconds(kind(boxes(4, 4, nics=4)), Move("sum", (NBYTES,), "hierarchical"), 16)
    assert four < one / 2.5


@both
def test_hierarchical_with_a_host_that_is_not_full_goes_over_one_rank_of_each(kind) -> None:
    network = kind(boxes(3, 4))
    found = seconds(network, Move("sum", (NBYTES,), "hierarchical"), 10)
    inside_s = 2 * 2 * (2e-6 + NBYTES / (10 * RATE))
    between_s = 2 * 2 * (2 * 31e-6) + 2 * 2 / 3 * NBYTES / RATE
    assert found == pytest.approx(inside_s + between_s, rel=1e-4)


@both
@pytest.mark.parametrize("size", [16, 10, 3])
def test_what_is_between_hosts_costs_as_much_as_there_are_hosts(kind, size: int) -> None:
    network, num_hosts = kind(boxes(4, 4)), -(-size // 4)
    depth = (min(size, 4) - 1).bit_length()
    for way in ("to_leaders", "from_leaders"):
        found = seconds(network, Move(way, (NBYTES,)), size)
        assert found == pytest.approx(depth * (2e-6 + NBYTES / (10 * RATE)), rel=1e-5)
    if num_hosts == 1:
        assert network.passages(Move("sum", (NBYTES,), "ring", among_hosts=True), size, 0) == ()
        return
    crossing_s = 2 * 31e-6
    ring_s = 2 * (num_hosts - 1) * crossing_s + 2 * (num_hosts - 1) / num_hosts * NBYTES / RATE
    gather_s = crossing_s + (num_hosts - 1) * NBYTES / RATE
    scatter_s = crossing_s + (num_hosts - 1) / num_hosts * NBYTES / RATE
    for move, expected_s in (
        (Move("sum", (NBYTES,), "ring", among_hosts=True), ring_s),
        (Move("gather", (NBYTES,), among_hosts=True), gather_s),
        (Move("scatter", (NBYTES,), among_hosts=True), scatter_s),
    ):
        assert seconds(network, move, size) == pytest.approx(expected_s, rel=1e-4)


@both
@pytest.mark.parametrize(("num_hosts", "devices"), [(2, 2), (4, 2), (3, 4), (2, 8)])
def test_shards_go_inside_hosts_first_and_then_between_them(kind, num_hosts: int, devices: int) -> None:
    network, size = kind(boxes(num_hosts, devices)), num_hosts * devices
    inside_s = 2e-6 + (devices - 1) / devices * NBYTES / (10 * RATE)
    # All ranks of a host share its link.
    between_s = 2 * 31e-6 + (num_hosts - 1) / num_hosts * devices * NBYTES / RATE
    assert seconds(network, Move("scatter_inside", (NBYTES,)), size) == pytest.approx(inside_s, rel=1e-4)
    assert seconds(network, Move("scatter_between", (NBYTES,)), size) == pytest.approx(between_s, rel=1e-4)


def test_what_is_inside_hosts_keeps_other_links_free() -> None:
    passages = AnalyticNetwork(boxes(2, 2)).passages(Move("sum", (NBYTES,), "hierarchical"), 4, 0)
    assert [passage.where for passage in passages] == [INSIDE, LINK, INSIDE]


def test_servers_that_are_few_can_get_and_send_at_the_same_time() -> None:
    """With one server, its two directions are what limits; with one beside every worker, both ways share all links."""
    network = AnalyticNetwork(hosts(8))
    few = network.passages(Move("serve", (NBYTES,), answer_bytes=NBYTES), 8, 1)
    many = network.passages(Move("serve", (NBYTES,), answer_bytes=NBYTES), 8, 8)
    busy_s = sum(passage.busy_s for passage in few if passage.where == LINK)
    assert busy_s == pytest.approx(7 * NBYTES / RATE), "half of both ways"
    assert sum(passage.busy_s for passage in few) == pytest.approx(2 * 7 * NBYTES / RATE)
    assert {passage.where for passage in many} == {LINK}
    assert sum(passage.busy_s for passage in many) == pytest.approx(2 * 7 / 8 * NBYTES / RATE)


def test_one_worker_of_many_sends_to_servers_at_the_speed_of_its_own_link() -> None:
    for network in (AnalyticNetwork(hosts(8)), FlowNetwork(hosts(8))):
        passages = network.passages(Move("serve", (NBYTES,), answer_bytes=NBYTES), 8, 8)
        assert sum(passage.rank_s for passage in passages) == pytest.approx(2 * 7 / 8 * NBYTES / RATE, rel=1e-6)


# -- flows and formulas ------------------------------------------------------------------------------------------

MOVES = st.one_of(
    st.builds(
        Move,
        st.just("sum"),
        st.tuples(st.integers(1 << 16, 1 << 26)),
        st.sampled_from(["native", *(name for name in ALGORITHMS if name != "hierarchical")]),
    ),
    st.builds(Move, st.sampled_from(["gather", "scatter", "send"]), st.tuples(st.integers(1 << 16, 1 << 24))),
    st.builds(
        lambda nbytes, topology: Move("mix", (nbytes,), peers=2, topology=topology),
        st.integers(1 << 16, 1 << 24),
        st.sampled_from(["ring", "exponential", "one_peer_exponential", "random_pairs"]),
    ),
)


@settings(max_examples=60)
@given(move=MOVES, size=st.integers(1, 20), delay_s=st.sampled_from([0.0, 1e-5, 0.02]), message_s=st.floats(0, 1e-3))
def test_flows_take_as_long_as_formulas_where_nothing_is_shared(
    move: Move, size: int, delay_s: float, message_s: float
) -> None:
    cluster = hosts(size, delay_s)
    analytic, flow = (kind(cluster, message_s=message_s) for kind in NETWORKS)
    assert seconds(flow, move, size) == pytest.approx(seconds(analytic, move, size), rel=1e-3, abs=1e-12)


@settings(max_examples=40)
@given(move=MOVES, size=st.integers(2, 32))
def test_flows_take_longer_where_links_are_shared(move: Move, size: int) -> None:
    tree = FatTree(hosts_per_leaf=4, oversubscription=4.0)
    cluster = Cluster(links=(Link(bandwidth_bps=8 * RATE, delay_s=1e-5),) * 32, topology=tree)
    analytic, flow = AnalyticNetwork(cluster), FlowNetwork(cluster)
    assert seconds(flow, move, size) >= seconds(analytic, move, size) * (1 - 1e-3)
    free = AnalyticNetwork(hosts(32, delay_s=1e-5))
    assert seconds(flow, move, size) >= seconds(free, move, size) * (1 - 1e-3)


@pytest.mark.parametrize("algorithm", ["halving_doubling", "native", "ring"])
def test_an_oversubscribed_tree_slows_long_distances_down(algorithm: str) -> None:
    tree = FatTree(hosts_per_leaf=4, oversubscription=4.0)
    cluster = Cluster(links=(Link(bandwidth_bps=8 * RATE),) * 16, topology=tree)
    move = Move("sum", (NBYTES,), algorithm)
    shared_s, free_s = (seconds(AnalyticNetwork(place), move, 16) for place in (cluster, hosts(16)))
    # Neighbours on a ring cross a leaf's uplink one at a time; of swaps at distance 4 and 8, four do.
    expected = 1.0 if algorithm != "halving_doubling" else (1 / 16 + 2 / 16 + 4 * (4 / 16 + 8 / 16)) / (15 / 16)
    assert shared_s / free_s == pytest.approx(expected, rel=1e-6)
    assert seconds(FlowNetwork(cluster), move, 16) == pytest.approx(shared_s, rel=1e-4)


def test_neighbours_are_those_of_the_graph() -> None:
    """On two racks, a ring crosses twice in each direction; who is 8 places on is always on the other one."""
    racks = Racks(sizes=(8, 8), uplinks=(Link(bandwidth_bps=8 * RATE),) * 2)
    cluster = Cluster(links=(Link(bandwidth_bps=8 * RATE),) * 16, topology=racks)
    for kind in NETWORKS:
        network = kind(cluster)
        ring = Move("mix", (NBYTES,), peers=2, topology="ring")
        assert seconds(network, ring, 16) == pytest.approx(2 * NBYTES / RATE)
        jumps = Move("mix", (NBYTES,), peers=1, topology="one_peer_exponential")
        # In four rounds 1, 2, 4 and 8 of a rack's messages cross its uplink.
        assert seconds(network, jumps, 16) == pytest.approx((1 + 2 + 4 + 8) / 4 * NBYTES / RATE)


# -- limits and tables -------------------------------------------------------------------------------------------


def test_what_would_be_too_much_for_flows_is_refused() -> None:
    network = FlowNetwork(hosts(1100))
    for move, servers, words in (
        (Move("sum", (8,), "tree"), 0, "up to 1024 ranks, got 1100"),
        (Move("scatter", (8,)), 0, "up to 512 ranks, got 1100"),
        (Move("serve", (8,), answer_bytes=8), 1100, "1100 x 1100"),
        (Move("serve", (8,), answer_bytes=8), -2, "not on hosts of their own"),
    ):
        with pytest.raises(UsageError, match=words):
            network.passages(move, 1100, servers)


def test_formulas_price_large_worlds() -> None:
    cluster = hosts(4096, delay_s=1e-5)
    network = AnalyticNetwork(cluster)
    for move in (
        Move("sum", (NBYTES,)),
        Move("scatter", (NBYTES,)),
        Move("mix", (NBYTES,), peers=2, topology="ring"),
    ):
        assert 0 < seconds(network, move, 4096) < 1
    assert seconds(network, Move("serve", (NBYTES,), answer_bytes=0), 4096, 4096) == pytest.approx(
        NBYTES / RATE + 2 * 2e-5, rel=1e-3
    )


def test_measured_tables_take_the_formulas_place() -> None:
    curve = Curve(kind="all_reduce", world_size=4, sizes=(1024, 2048), seconds=(3.0, 4.0), further=(1.5,))
    cluster = replace(hosts(8), measured=Measured(curves=(curve,)))
    network = AnalyticNetwork(cluster)
    (passage,) = network.passages(Move("sum", (1536,)), 4, 0)
    assert passage.seconds == pytest.approx(3.5)
    # Two seconds are start-up, on the line through both sizes; half a second of them nothing goes on beside.
    assert (passage.startup_s, passage.latency_s, passage.busy_s) == pytest.approx((0.5, 1.5, 1.5))
    assert not network.warnings()
    seconds(network, Move("sum", (1 << 20,)), 4)
    assert any("extrapolated" in warning for warning in network.warnings())
    assert seconds(network, Move("sum", (NBYTES,)), 8) == pytest.approx(2 * 7 / 8 * NBYTES / RATE)
    assert any("among 4 ranks, not among 8" in warning for warning in network.warnings())


def test_start_up_beside_others_bytes_is_told_apart() -> None:
    curve = Curve(kind="all_reduce", world_size=4, sizes=(100, 10_000), seconds=(0.0071, 0.017), further=(0.005, 0.01))
    network = AnalyticNetwork(replace(hosts(4), measured=Measured(curves=(curve,))))
    (passage,) = network.passages(Move("sum", (5000,)), 4, 0)
    assert (passage.issue_s, passage.startup_s) == pytest.approx((0.005, 0.0))
    assert (passage.busy_s, passage.latency_s) == pytest.approx((0.005, 0.002))
    (both,) = network.passages(Move("sum", (2500, 2500)), 4, 0)
    assert both.issue_s == pytest.approx(0.01), "two messages are started"


def test_neighbours_cost_as_many_measured_messages_as_there_are() -> None:
    curve = Curve(kind="send", world_size=2, sizes=(1000, 9000), seconds=(1.0, 9.0))
    network = AnalyticNetwork(replace(hosts(4), measured=Measured(curves=(curve,))))
    assert seconds(network, Move("mix", (2000,), peers=2, topology="ring"), 4) == pytest.approx(4.0)
    # Servers: a million times slower than stated, as the message between two is.
    assert seconds(network, Move("serve", (1000,), answer_bytes=0), 4, 4) == pytest.approx(0.75)
