"""How a model is spread over servers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import laconic
from laconic.architecture import ParameterServer
from laconic.architecture.servers.shares import server_shares
from laconic.cluster import Cluster, Link, Racks
from laconic.core.in_process import InProcessTransport
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.errors import InvalidSetting
from laconic.simulator import simulate
from laconic.simulator.network.flow import FlowNetwork
from laconic.simulator.network.pair_rates import pair_rates
from laconic.strategy import Strategy
from tests.architecture.test_fast_pairs import Sites
from tests.simulator.jobs import job

SMALLEST_BYTES = 65_536

sizes = st.lists(st.integers(0, 300_000), min_size=1, max_size=12)


@given(sizes, st.integers(1, 9))
def test_every_element_has_one_server_and_loads_are_even(numels: list[int], world_size: int) -> None:
    tensors = [TensorSpec(f"t{index}", (numel,)) for index, numel in enumerate(numels)]
    buckets = Strategy.parse("bsp / parameter_server / none / sequential").plan(tensors, world_size).buckets
    found: dict[str, list[tuple[int, int]]] = {}
    for bucket in buckets:
        for part in bucket.tensors:
            found.setdefault(part.owner, []).append((part.start, part.start + part.numel))
    for tensor in tensors:
        ends = sorted(found[tensor.name])
        assert ends[0][0] == 0
        assert ends[-1][1] == tensor.numel
        assert all(one[1] == other[0] for one, other in pairwise(ends))
    loads = [0] * world_size
    for bucket, server in zip(buckets, ParameterServer().servers.owners(buckets, world_size), strict=True):
        loads[server] += bucket.nbytes
    # No piece is larger than its share by more than what is not worth cutting off, at both ends.
    assert max(loads) <= 4 * sum(numels) / world_size + 2 * SMALLEST_BYTES


def test_tensors_stay_whole_where_their_shapes_count() -> None:
    large = [TensorSpec("embedding", (1000, 1000)), TensorSpec("bias", (1000,))]
    for text in (
        "bsp / parameter_server / powersgd + error_feedback",
        "ssp / parameter_server",
        "local_sgd / parameter_server",
    ):
        plan = Strategy.parse(text).plan(large, 4)
        assert {tensor.name for bucket in plan.buckets for tensor in bucket.tensors} == {"embedding", "bias"}
    cut = Strategy.parse("bsp / parameter_server / none / sequential").plan(large, 4)
    assert [bucket.nbytes for bucket in cut.buckets] == [1_001_000, 1_001_000, 1_001_000, 1_001_000]


def test_small_buckets_are_not_cut() -> None:
    small = Bucket((TensorSpec("small", (16_000,)),))
    assert Strategy.parse("bsp / parameter_server").plan(small.tensors, 4).buckets == (small,)


# -- shares that follow from measured links ------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 32])
def test_links_that_are_alike_give_equal_shares(size: int) -> None:
    """Noise of 20% changes nothing."""
    noise = (1e9 * (1 - 0.2 * np.random.default_rng(size).random((size, size)))).tolist()
    assert server_shares(tuple(map(tuple, noise))) == pytest.approx([1 / size] * size)


def test_a_host_behind_a_slow_link_gets_nothing() -> None:
    pairs = [[1.0 if 3 in (i, j) else 4.0 for j in range(4)] for i in range(4)]
    *others, slow = server_shares(tuple(map(tuple, pairs)))
    assert slow == 0
    assert others == pytest.approx([1 / 3] * 3, abs=1 / 32)


def test_servers_are_in_the_larger_of_two_racks() -> None:
    link = Link(bandwidth_bps=1e8)
    racks = Cluster(links=(link,) * 6, topology=Racks(sizes=(4, 2), uplinks=(link, link)))
    shares = server_shares(pair_rates(racks, range(6)))
    assert sum(shares[:4]) / 4 > 2 * sum(shares[4:]) / 2


@pytest.mark.filterwarnings("error")
def test_pairs_that_exchange_nothing() -> None:
    """As good as no link: their servers get little; where nothing is known, shares are equal."""
    pairs = [[1e9] * 4 for _ in range(4)]
    pairs[0][1] = pairs[1][0] = 0.0
    for host in range(3):
        pairs[host][3] = pairs[3][host] = 1e7
    *shares, slow = server_shares(tuple(map(tuple, pairs)))
    assert slow < 0.1
    assert shares[2] > 0.8
    assert server_shares(((0.0, 0.0), (0.0, 0.0))) == (0.5, 0.5)
    assert server_shares(((np.inf, np.inf), (np.inf, np.inf))) == (0.5, 0.5)


def busiest_s(pairs: np.ndarray, shares: np.ndarray) -> float:
    """By the formula, written with loops."""
    size = len(shares)
    return max(sum((shares[i] + shares[j]) / pairs[i][j] for j in range(size) if j != i) for i in range(size))


@pytest.mark.slow
@given(st.integers(2, 6), st.randoms(use_true_random=False))
def test_no_host_is_busier_than_with_equal_or_random_shares(size: int, random) -> None:
    pairs = np.ones((size, size))
    for i in range(size):
        for j in range(i):
            pairs[i, j] = pairs[j, i] = random.choice([1.0, 2.0, 8.0, 64.0])
    shares = np.array(server_shares(tuple(map(tuple, pairs.tolist()))))
    assert shares.sum() == pytest.approx(1)
    # A unit of 1 / (8 n) more or less.
    most = busiest_s(pairs, shares) * 0.85
    assert most <= busiest_s(pairs, np.full(size, 1 / size))
    for _ in range(20):
        drawn = np.array([random.random() ** 3 for _ in range(size)]) + 1e-9
        assert most <= busiest_s(pairs, drawn / drawn.sum())


@given(sizes, st.lists(st.integers(0, 5), min_size=2, max_size=6).filter(any))
@example([162_500], [5, 1, 1, 1, 1, 1])
@example([39_322, 157_287], [1, 5])
def test_loads_follow_shares(numels: list[int], units: list[int]) -> None:
    shares = tuple(unit / sum(units) for unit in units)
    strategy = Strategy.parse("bsp / parameter_server / none / sequential")
    placed = replace(strategy, architecture=replace(strategy.architecture, shares=shares))
    tensors = [TensorSpec(f"t{index}", (numel,)) for index, numel in enumerate(numels)]
    buckets = placed.plan(tensors, len(units)).buckets
    total = 4 * sum(numels)
    assert sum(bucket.nbytes for bucket in buckets) == total
    assert all(bucket.nbytes <= total * max(shares) + 2 * SMALLEST_BYTES for bucket in buckets)
    held: list[list[int]] = [[] for _ in units]
    for bucket, server in zip(buckets, placed.architecture.servers.owners(buckets, len(units)), strict=True):
        held[server].append(bucket.nbytes)
    for mine, share in zip(held, shares, strict=True):
        assert share or not mine
        for others, other in zip(held, shares, strict=True):
            # No server would have been less full for its share with the last bucket that another one got.
            assert not mine or not other or sum(mine) * other <= (sum(others) + min(mine)) * share * (1 + 1e-9)


@pytest.mark.slow
def test_links_are_measured_when_attaching_and_no_bit_changes() -> None:
    """The last rank is far from the others; shares change where sums are formed, not what they are."""
    found: dict[str, list[torch.Tensor]] = {}
    for placement in ("evenly", "measured"):
        text = f"bsp / parameter_server(placement={placement}) / none / sequential"
        torch.manual_seed(0)
        models = [torch.nn.Linear(300, 400) for _ in range(4)]
        for model in models[1:]:
            model.load_state_dict(models[0].state_dict())

        def one_rank(transport: InProcessTransport, text: str = text, models: list = models) -> dict:
            model, events = models[transport.rank], laconic.EventList()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            with laconic.attach(model, optimizer, text, transport=transport, events=events):
                drawn = torch.Generator().manual_seed(transport.rank)
                for _ in range(3):
                    model(torch.randn(2, 300, generator=drawn)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            (attached,) = [event for event in events.events if event.kind == "attach"]
            return attached.data

        # Only where links are measured do servers have processes of their own, which take long to start.
        cluster = Sites(4, timeout_s=60) if placement == "measured" else laconic.InProcessCluster(4, timeout_s=60)
        if isinstance(cluster, Sites):
            cluster.num_near = 3
        facts = cluster.run(one_rank)
        found[placement] = [parameter.detach().clone() for parameter in models[0].parameters()]
        assert all(("shares" in one) == (placement == "measured") for one in facts)
        assert len({str(one.get("shares")) for one in facts}) == 1
        assert placement == "evenly" or facts[0]["shares"].endswith(" 0%")
    for evenly, measured in zip(*found.values(), strict=True):
        assert torch.equal(evenly, measured)


@pytest.mark.parametrize("flow", [False, True])
def test_the_simulator_knows_the_shares(flow: bool) -> None:
    link, slow = Link(bandwidth_bps=1e8), Link(bandwidth_bps=2.5e7)
    cluster = Cluster.uniform(4, link, {3: slow})
    work = job(*[(0.001, 0.002, 2_000_000)] * 6)
    evenly, measured = (
        simulate(
            f"bsp / parameter_server(placement={placement}) / none / fusion(bytes=2MB)",
            work,
            cluster,
            network=FlowNetwork(cluster) if flow else None,
        ).prediction.step_s
        for placement in ("evenly", "measured")
    )
    # The slow host carries N instead of (n - 2) N / n + N = 1.5 N each way; the last answer overlaps with nothing.
    assert 1.3 < evenly / measured < 1.5


def test_uplinks_are_simulated_for_a_few_hosts_too() -> None:
    link = Link(bandwidth_bps=1e9)
    apart = Cluster(links=(link,) * 4, topology=Racks(sizes=(2, 2), uplinks=(Link(bandwidth_bps=1e8),) * 2))
    flat, racks = (
        simulate("bsp / parameter_server", job((0.001, 0.002, 2_000_000)), cluster).prediction.step_s
        for cluster in (Cluster.uniform(4, link), apart)
    )
    assert racks > 5 * flat


@pytest.mark.parametrize("other", ["shards=2", 'hosts="10.0.0.1:29600"'])
def test_shares_need_a_server_on_every_host(other: str) -> None:
    name = other.partition("=")[0]
    with pytest.raises(InvalidSetting, match=f"placement=measured needs one server .* Leave out {name}"):
        Strategy.parse(f"bsp / parameter_server(placement=measured, {other})")
