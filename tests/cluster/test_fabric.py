"""Routes over every topology, against walks found by an independent search and against formulas."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict, deque
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.cluster import BCube, Cluster, Dragonfly, Fabric, FatTree, Link, Racks, Rail, Switch, Topology, Torus
from tests.cluster.examples import clusters

LINK = Link(bandwidth_bps=8e9, delay_s=1e-3)  # a gigabyte per second
INSIDE = Link(bandwidth_bps=80e9, delay_s=1e-6)


def joined(topology: Topology, hosts: int, *, nics: int = 1, devices: int = 1) -> Fabric:
    inside = INSIDE if devices > 1 else None
    return Cluster(
        links=(LINK,) * hosts, topology=topology, nics=nics, devices_per_host=devices, inside=inside
    ).fabric()


def route(fabric: Fabric, source: int, destination: int) -> list[str]:
    first, links = fabric.routes(np.array([source]), np.array([destination]))
    assert first.tolist() == [0, len(links)]
    return [fabric.link_name(int(link)) for link in links]


def ends(name: str) -> tuple[str, str]:
    """What a link joins; a host's NICs and bus are the host."""
    start, end = re.sub(r"bus of host", "host", re.sub(r", NIC \d+", "", name)).split(" -> ")
    return start, end


def walk(names: list[str]) -> list[str]:
    """The places a route comes through; fails unless each link begins where the last one ended."""
    places = [ends(names[0])[0]] if names else []
    for name in names:
        start, end = ends(name)
        assert start == places[-1], names
        places.append(end)
    return places


def place_of(device: int, devices_per_host: int) -> str:
    host, place = divmod(device, devices_per_host)
    return f"device {place} of host {host}" if devices_per_host > 1 else f"host {host}"


@given(clusters(), st.data())
@settings(max_examples=60)
def test_every_route_is_a_walk_from_its_source_to_its_destination(cluster: Cluster, data: st.DataObject) -> None:
    fabric = cluster.fabric()
    assert fabric.num_devices == cluster.num_devices
    assert len(fabric.capacity_bytes_per_s) == len(fabric.delay_s)
    assert fabric.capacity_bytes_per_s.min() > 0
    device = st.integers(0, fabric.num_devices - 1)
    pairs = data.draw(st.lists(st.tuples(device, device), min_size=1, max_size=20))
    sources, destinations = (np.array(column) for column in zip(*pairs, strict=True))
    first, links = fabric.routes(sources, destinations)
    assert first[0] == 0
    assert first[-1] == len(links)
    for index, (source, destination) in enumerate(pairs):
        names = [fabric.link_name(int(link)) for link in links[first[index] : first[index + 1]]]
        # Alone or among others, a message takes the same way.
        assert names == route(fabric, source, destination)
        if source == destination:
            assert names == []
            continue
        places = walk(names)
        assert places[0] == place_of(source, cluster.devices_per_host)
        assert places[-1] == place_of(destination, cluster.devices_per_host)
        assert len(set(places)) == len(places), "a route must not come by twice"


def hops_by_search(fabric: Fabric, source: str) -> dict[str, int]:
    """Links on the shortest way to each place, by breadth-first search over the names of all links."""
    neighbours: dict[str, set[str]] = defaultdict(set)
    for link in range(len(fabric.delay_s)):
        start, end = ends(fabric.link_name(link))
        neighbours[start].add(end)
    found, queue = {source: 0}, deque([source])
    while queue:
        place = queue.popleft()
        for other in neighbours[place] - found.keys():
            found[other] = found[place] + 1
            queue.append(other)
    return found


@pytest.mark.parametrize(
    ("topology", "hosts", "nics"),
    [
        (Switch(), 5, 1),
        (Racks(sizes=(2, 3), uplinks=(LINK, LINK)), 5, 1),
        (FatTree(hosts_per_leaf=3, oversubscription=2), 10, 1),
        (FatTree(hosts_per_leaf=2, leaves_per_pod=2, pod_oversubscription=2), 12, 1),
        (Torus(dims=(5,)), 5, 1),
        (Torus(dims=(4, 3)), 12, 1),
        (Torus(dims=(2, 3, 4)), 24, 1),
        (BCube(n=4, k=0), 4, 1),
        (BCube(n=3, k=1), 9, 2),
        (BCube(n=2, k=3), 16, 4),
    ],
    ids=lambda value: str(value.describe() or "switch") if isinstance(value, Topology) else None,
)
def test_routes_are_the_shortest(topology: Topology, hosts: int, nics: int) -> None:
    fabric = joined(topology, hosts, nics=nics)
    for source in range(hosts):
        shortest = hops_by_search(fabric, f"host {source}")
        for destination in range(hosts):
            assert len(route(fabric, source, destination)) == shortest[f"host {destination}"]


def test_a_switch_by_hand() -> None:
    fabric = Cluster.uniform(3, LINK, {1: Link(bandwidth_bps=4e9)}).fabric()
    assert route(fabric, 0, 1) == ["host 0 -> switch", "switch -> host 1"]
    first, links = fabric.routes(np.array([0, 2, 1]), np.array([1, 2, 0]))
    assert first.tolist() == [0, 2, 2, 4]
    assert fabric.capacity_bytes_per_s[links].tolist() == [1e9, 0.5e9, 0.5e9, 1e9]
    assert fabric.delay_s[links].tolist() == [1e-3, 0, 0, 1e-3]
    with pytest.raises(IndexError, match="no link 6"):
        fabric.link_name(6)
    for sources, destinations in (([3], [0]), ([-1], [0]), ([0, 1], [0])):
        with pytest.raises(ValueError, match=r"numbered 0 to 2|as many"):
            fabric.routes(np.array(sources), np.array(destinations))
    first, links = fabric.routes(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
    assert (first.tolist(), links.tolist()) == ([0], [])


def capacities(fabric: Fabric, pattern: str) -> list[float]:
    return [
        capacity
        for link, capacity in enumerate(fabric.capacity_bytes_per_s.tolist())
        if re.fullmatch(pattern, fabric.link_name(link))
    ]


def test_racks_share_their_uplink() -> None:
    slow = Link(bandwidth_bps=4e8, delay_s=0.01)
    fabric = joined(Racks(sizes=(2, 1), uplinks=(LINK, slow)), 3)
    assert route(fabric, 0, 1) == ["host 0 -> rack 0", "rack 0 -> host 1"]
    assert route(fabric, 1, 2) == ["host 1 -> rack 0", "rack 0 -> core", "core -> rack 1", "rack 1 -> host 2"]
    assert capacities(fabric, "core -> rack 1") == [5e7]


def test_what_leaves_a_leaf_is_oversubscribed() -> None:
    fabric = joined(FatTree(hosts_per_leaf=8, oversubscription=4.0), 24)
    up = capacities(fabric, r"leaf 0 -> spine \d+")
    assert up == [1e9, 1e9]  # 8 hosts of 1 GB/s at 4:1, in cables like theirs
    assert capacities(fabric, r"spine \d+ -> leaf 0") == up
    wide = joined(FatTree(hosts_per_leaf=8, oversubscription=2.0, spines=1), 24, nics=2)
    assert capacities(wide, r"leaf 1 -> spine 0") == [8 * 2 * 1e9 / 2]
    high = joined(FatTree(hosts_per_leaf=2, leaves_per_pod=4, pod_oversubscription=2.0), 24)
    # A pod has 4 leaves with 2 cables each; at 2:1, half of that leaves it.
    assert sum(capacities(high, r"pod 0, spine \d+ -> core .*")) == 4e9
    assert sum(capacities(high, r"leaf \d -> pod 0, spine \d")) == 8e9
    assert len(route(high, 0, 1)) == 2
    assert len(route(high, 0, 7)) == 4
    assert len(route(high, 0, 8)) == 6


def test_equal_paths_are_all_used_and_always_in_the_same_way() -> None:
    fabric = joined(FatTree(hosts_per_leaf=32, oversubscription=4.0), 1024)
    ranks = np.arange(1024)
    sources, destinations = np.repeat(ranks[:64], 1024), np.tile(ranks, 64)
    first, links = fabric.routes(sources, destinations)
    used = Counter(
        fabric.link_name(int(link)).split(" -> ")[1] for link in links if "-> spine" in fabric.link_name(int(link))
    )
    assert len(used) == 8
    mean = sum(used.values()) / 8
    assert all(abs(count - mean) < 0.05 * mean for count in used.values())
    again = joined(FatTree(hosts_per_leaf=32, oversubscription=4.0), 1024).routes(sources, destinations)
    assert np.array_equal(again[0], first)
    assert np.array_equal(again[1], links)


def test_devices_share_nics_and_the_bus() -> None:
    fabric = joined(Switch(), 2, nics=2, devices=4)
    assert route(fabric, 1, 2) == ["device 1 of host 0 -> bus of host 0", "bus of host 0 -> device 2 of host 0"]
    assert route(fabric, 1, 7) == [
        "device 1 of host 0 -> bus of host 0",
        "host 0, NIC 0 -> switch",
        "switch -> host 1, NIC 1",
        "bus of host 1 -> device 3 of host 1",
    ]
    nics = {device: route(fabric, device, 4)[1] for device in range(4)}
    assert [nics[device][:13] for device in range(4)] == ["host 0, NIC 0"] * 2 + ["host 0, NIC 1"] * 2
    several = joined(Switch(), 64, nics=4)  # one device with four NICs of its own
    used = Counter(route(several, 0, other)[0] for other in range(1, 64))
    assert len(used) == 4


def test_rails() -> None:
    fabric = joined(Rail(oversubscription=2.0), 4, nics=4, devices=4)
    assert route(fabric, 1, 13)[1:-1] == ["host 0, NIC 1 -> rail 1", "rail 1 -> host 3, NIC 1"]
    assert route(fabric, 1, 14)[1:-1] == [
        "host 0, NIC 1 -> rail 1",
        "rail 1 -> spine",
        "spine -> rail 2",
        "rail 2 -> host 3, NIC 2",
    ]
    assert capacities(fabric, "rail 3 -> spine") == [4 * 1e9 / 2]


def test_a_dragonfly_takes_one_cable_between_groups() -> None:
    shape = Dragonfly(groups=5, routers=4, hosts_per_router=2, between_bps=16e9, cables=2)
    fabric = joined(shape, 40)
    for source in range(40):
        for destination in range(40):
            names = route(fabric, source, destination)
            routers = [re.findall(r"router (\d+)\.(\d+)", name) for name in names]
            between = [pair for pair in routers if len(pair) == 2]
            crossing = [pair for pair in between if pair[0][0] != pair[1][0]]
            assert len(crossing) == (source // 8 != destination // 8)
            assert len(between) <= (3 if crossing else 1)
    assert set(capacities(fabric, r"router 0\.\d -> router 1\.\d")) == {2e9}
    assert set(capacities(fabric, r"router 0\.0 -> router 0\.1")) == {1e9}
    # The far ends of a cable's two directions are the same two routers.
    directed = {ends(fabric.link_name(link)) for link in range(160, len(fabric.delay_s))}
    crossing = {pair for pair in directed if pair[0].split(".")[0] != pair[1].split(".")[0]}
    assert all((end, start) in crossing for start, end in crossing)


def test_a_torus_goes_the_shorter_way_round() -> None:
    fabric = joined(Torus(dims=(4, 5)), 20)
    assert walk(route(fabric, 0, 3)) == ["host 0", "host 4", "host 3"]
    assert walk(route(fabric, 6, 17)) == ["host 6", "host 11", "host 16", "host 17"] or (
        walk(route(fabric, 6, 17)) == ["host 6", "host 1", "host 16", "host 17"]
    )
    # Two rows on either way is as short; both are used.
    ways = {route(fabric, column, 10 + column)[0].split("-> ")[1] for column in range(5)}
    assert any(way in ways for way in (f"host {5 + column}" for column in range(5)))
    assert any(way in ways for way in (f"host {15 + column}" for column in range(5)))


def test_bcube_corrects_one_digit_at_a_time() -> None:
    fabric = joined(BCube(n=3, k=2), 27, nics=3)
    for source, destination in ((0, 26), (5, 23), (13, 9)):
        hosts = [int(place.removeprefix("host ")) for place in walk(route(fabric, source, destination))[::2]]
        for here, there in pairwise(hosts):
            digits = [(here // 3**level % 3, there // 3**level % 3) for level in range(3)]
            assert sum(one != other for one, other in digits) == 1
            # Each step corrects its digit for good.
            assert all(
                other == destination // 3**level % 3 for level, (one, other) in enumerate(digits) if one != other
            )
    assert len({route(fabric, 0, other)[0] for other in range(1, 27)}) == 3, "all NICs are used"


@pytest.mark.parametrize(
    ("topology", "nics", "devices"),
    [
        (Switch(), 1, 1),
        (FatTree(hosts_per_leaf=32, oversubscription=4, leaves_per_pod=16), 1, 1),
        (Torus(dims=(16, 32, 32)), 1, 1),
        (Rail(), 8, 8),
        (Dragonfly(groups=64, routers=16, hosts_per_router=16), 1, 1),
        (BCube(n=128, k=1), 2, 1),
    ],
    ids=lambda value: value.kind if isinstance(value, Topology) else None,
)
def test_large_clusters_are_cheap(topology: Topology, nics: int, devices: int) -> None:
    began_s = time.perf_counter()
    fabric = joined(topology, 16_384, nics=nics, devices=devices)
    made_s = time.perf_counter() - began_s
    generator = np.random.default_rng(0)
    sources, destinations = generator.integers(0, fabric.num_devices, (2, 65_536))
    began_s = time.perf_counter()
    first, links = fabric.routes(sources, destinations)
    routed_s = time.perf_counter() - began_s
    assert len(first) == 65_537
    assert links.max() < len(fabric.delay_s)
    # Ten times what it takes on a slow core, so that only a loop over messages fails.
    assert made_s < 1.5
    assert routed_s < 3
