"""Clusters of all kinds for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from laconic.cluster import (
    BCube,
    Cluster,
    Curve,
    Dragonfly,
    FatTree,
    Link,
    Measured,
    Racks,
    Rail,
    Switch,
    Topology,
    Torus,
)

links = st.builds(
    Link,
    bandwidth_bps=st.one_of(st.floats(1e3, 1e13), st.integers(1, 10_000).map(lambda number: number * 1e6)),
    delay_s=st.one_of(st.just(0.0), st.floats(0, 10)),
    loss_ratio=st.one_of(st.just(0.0), st.floats(0, 0.99)),
)
_ratios = st.floats(0.01, 1000)
_delays = st.floats(0, 10)
_rates = st.one_of(st.none(), st.floats(1e3, 1e13))


@st.composite
def joined(draw: st.DrawFn) -> tuple[Topology, int, int, int]:
    """A topology, and how many hosts, NICs and devices per host it can join."""
    kind = draw(st.sampled_from(["switch", "racks", "fat_tree", "torus", "rail", "dragonfly", "bcube"]))
    hosts = draw(st.integers(1, 24))
    nics, devices = draw(st.sampled_from([(1, 1), (1, 4), (2, 4), (4, 4), (4, 2), (2, 1)]))
    if kind == "racks":
        sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
        uplinks = draw(st.lists(links, min_size=len(sizes), max_size=len(sizes)))
        hosts = iter(draw(st.permutations(range(sum(sizes)))))
        members = tuple(tuple(next(hosts) for _ in range(size)) for size in sizes)
        return Racks(members=members, uplinks=tuple(uplinks)), sum(sizes), nics, devices
    if kind == "fat_tree":
        pods = draw(st.one_of(st.none(), st.integers(1, 3)))
        tree = FatTree(
            hosts_per_leaf=draw(st.integers(1, 6)),
            oversubscription=draw(_ratios),
            spines=draw(st.one_of(st.none(), st.integers(1, 4))),
            leaves_per_pod=pods,
            pod_oversubscription=draw(_ratios) if pods else 1.0,
            delay_s=draw(_delays),
        )
        return tree, hosts, nics, devices
    if kind == "torus":
        torus = Torus(dims=tuple(draw(st.lists(st.integers(2, 5), min_size=1, max_size=3))))
        hosts = 1
        for extent in torus.dims:
            hosts *= extent
        return torus, hosts, 1, devices
    if kind == "rail":
        return Rail(oversubscription=draw(_ratios), delay_s=draw(_delays)), hosts, min(nics, devices), devices
    if kind == "dragonfly":
        groups, routers, per_router = (draw(st.integers(1, 4)) for _ in range(3))
        dragonfly = Dragonfly(
            groups=groups,
            routers=routers,
            hosts_per_router=per_router,
            cables=draw(st.integers(1, 3)),
            local_bps=draw(_rates),
            between_bps=draw(_rates),
            delay_s=draw(_delays),
        )
        return dragonfly, draw(st.integers(1, groups * routers * per_router)), nics, devices
    if kind == "bcube":
        n, k = draw(st.integers(2, 4)), draw(st.integers(0, 2))
        return BCube(n=n, k=k), n ** (k + 1), k + 1, devices
    return Switch(), hosts, nics, devices


@st.composite
def _curves(draw: st.DrawFn) -> Curve:
    sizes = sorted(draw(st.sets(st.integers(1, 2**40), min_size=1, max_size=6)))
    return Curve(
        kind=draw(st.sampled_from(["all_reduce", "all_reduce(ring)", "all_gather", "all_to_all", "send(inside)"])),
        world_size=draw(st.integers(2, 64)),
        sizes=tuple(sizes),
        seconds=tuple(draw(st.lists(st.floats(1e-9, 100), min_size=len(sizes), max_size=len(sizes)))),
        further=tuple(draw(st.lists(st.floats(0, 1), max_size=len(sizes)))),
    )


@st.composite
def measurements(draw: st.DrawFn) -> Measured:
    ranks = draw(st.integers(0, 3))
    row = st.lists(st.floats(0, 1e13), min_size=ranks, max_size=ranks).map(tuple)
    return Measured(
        curves=tuple(draw(st.lists(_curves(), max_size=4, unique_by=lambda curve: (curve.kind, curve.world_size)))),
        transport=draw(st.text(max_size=20)),
        pairs_bps=tuple(draw(st.lists(row, min_size=ranks, max_size=ranks))),
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    topology, hosts, nics, devices = draw(joined())
    few = draw(st.lists(links, min_size=1, max_size=3))
    return Cluster(
        links=tuple(draw(st.lists(st.sampled_from(few), min_size=hosts, max_size=hosts))),
        topology=topology,
        devices_per_host=devices,
        inside=draw(links) if devices > 1 else None,
        nics=nics,
        speeds=tuple(draw(st.lists(st.sampled_from([1.0, 0.5, 1.25]), min_size=hosts, max_size=hosts))),
        name=draw(st.text(max_size=10)),
        source=draw(st.text(max_size=30)),
        measured=draw(st.one_of(st.none(), measurements())),
    )
