"""Clusters as data: what TOML means, and what is refused."""

from __future__ import annotations

import contextlib
import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.cluster import PRESETS, TOPOLOGIES, Cluster, FatTree, Link, Racks, Rail, Torus
from laconic.errors import LaconicError, UsageError
from tests.cluster.examples import clusters

LINK = Link(bandwidth_bps=1e9)
DRAGONFLY = '[topology]\nkind = "dragonfly"\ngroups = 2\nrouters = 2\nhosts_per_router = 2\n'


def test_hosts_on_one_switch_with_exceptions() -> None:
    cluster = Cluster.from_toml(
        'hosts = 3\nbandwidth = "100mbit"\ndelay = "5ms"\n[[host]]\nindex = 1\nbandwidth = "10mbit"'
    )
    fast, slow = Link(bandwidth_bps=1e8, delay_s=0.005), Link(bandwidth_bps=1e7, delay_s=0.005)
    assert cluster == Cluster(links=(fast, slow, fast))
    assert cluster.describe() == "3 hosts at 100mbit, delay 5ms; host 1: 10mbit, delay 5ms"


def test_racks() -> None:
    cluster = Cluster.from_toml(
        'bandwidth = 1e9\nloss = "0.1%"\n[[rack]]\nhosts = 2\nuplink = "500mbit"\n[[rack]]\nhosts = 1\nuplink = 1e8'
    )
    assert cluster.rack_of == (0, 0, 1)
    assert [link.bandwidth_bps for link in cluster.uplinks] == [5e8, 1e8]
    assert all(link.loss_ratio == 0.001 for link in cluster.links)


def test_racks_with_members_of_their_own() -> None:
    cluster = Cluster.from_toml(
        "bandwidth = 1e9\n[[rack]]\nhosts = [3, 0]\nuplink = 5e8\n[[rack]]\nhosts = [1, 2]\nuplink = 1e8"
    )
    assert cluster.rack_of == (0, 1, 1, 0)
    assert cluster.describe() == "4 hosts at 1gbit; 2 racks behind 500mbit, 100mbit: hosts 0 3 | 1 2"
    assert Cluster.from_toml(cluster.to_toml()) == cluster
    in_turn = Cluster.in_racks(6, LINK, racks=2, oversubscription=4, in_turn=True)
    assert in_turn.rack_of == (0, 1, 0, 1, 0, 1)
    assert Cluster.in_racks(6, LINK, racks=3).rack_of == (0, 0, 1, 1, 2, 2)
    # Three hosts of 1 Gbit/s, of which a quarter can leave.
    assert {link.bandwidth_bps for link in in_turn.uplinks} == {7.5e8}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("hosts = 2", "bandwidth is missing"),
        ('bandwidth = "1gbit"', "hosts must be a whole number from 1 to 65536, got nothing"),
        ('hosts = 0\nbandwidth = "1gbit"', "got 0"),
        ('hosts = 2\nbandwidth = "fast"', 'must be a rate such as 100mbit, got "fast"'),
        ("hosts = 2\nbandwidth = 0", "between 1kbit and 10tbit"),
        ('hosts = 2\nbandwidth = "1gbit"\nloss = "100%"', "below 1"),
        ('hosts = 2\nbandwidth = "1gbit"\ndelay = "1h"', "between 0 and 10 s"),
        ('hosts = 2\nbandwith = "1gbit"', 'Did you mean "bandwidth"?'),
        ('hosts = 2\nbandwidth = "1gbit"\n[[host]]\nindex = 2', "there is no host 2; hosts are numbered 0 to 1"),
        ('hosts = 2\nbandwidth = "1gbit"\n[[rack]]\nhosts = 1\nuplink = "1gbit"', "not both"),
        ('bandwidth = "1gbit"\n[[rack]]\nhosts = 1', "uplink is missing"),
        ('bandwidth = "1gbit"\nrack = 3', "[[rack]] tables"),
        ("bandwidth = 1e9\n[[rack]]\nhosts = [0, 2]\nuplink = 1e9", "each of the hosts 0 to 1 once, got [[0, 2]]"),
        (
            "bandwidth = 1e9\n[[rack]]\nhosts = [0]\nuplink = 1e9\n[[rack]]\nhosts = 1\nuplink = 1e9",
            "or the hosts of every rack, not both",
        ),
        ("hosts = ", "cannot be read"),
        (f"hosts = 2\nbandwidth = {10**400}", "between 1kbit and 10tbit"),
        (f"bandwidth = 1e9\nhosts = {10**400}", "hosts must be a whole number"),
        ('hosts = 65537\nbandwidth = "1gbit"', "from 1 to 65536, got 65537"),
        ('hosts = 2\nbandwidth = "1gbit"\ndevices_per_host = 2', "the link between them is needed"),
        ('hosts = 2\nbandwidth = "1gbit"\n[inside]\nbandwidth = "1gbit"', "no effect with one device"),
        ('hosts = 2\nbandwidth = "1gbit"\ninside = "1gbit"', "write inside as a table [inside]"),
        ('hosts = 2\nbandwidth = "1gbit"\n[[host]]\nindex = 1\nspeed = 0', "speed must be a number from 0.001 to 1000"),
        ('hosts = 2\nbandwidth = "1gbit"\nname = 3', "name must be text"),
        ('hosts = 2\nbandwidth = "1gbit"\n[topology]', "kind is missing. Known: switch, racks, fat_tree"),
        ('hosts = 2\nbandwidth = "1gbit"\n[topology]\nkind = "fattree"', 'Did you mean "fat_tree"?'),
        ('hosts = 2\nbandwidth = "1gbit"\n[topology]\nkind = "racks"', "write racks as [[rack]] tables"),
        ('hosts = 2\nbandwidth = "1gbit"\n[topology]\nkind = "fat_tree"', "hosts_per_leaf is missing"),
        ('hosts = 2\nbandwidth = "1gbit"\n[topology]\nkind = "torus"\ndim = [2]', 'Did you mean "dims"?'),
        (
            'hosts = 6\nbandwidth = "1gbit"\n[topology]\nkind = "torus"\ndims = [2, 2]',
            "2 x 2 hold 4 hosts, but there are 6",
        ),
        (
            'hosts = 2\nbandwidth = "1gbit"\n[topology]\nkind = "torus"\ndims = 2',
            "dims must be a list with 1 to 3 entries",
        ),
        ('hosts = 2\nbandwidth = "1gbit"\n[topology]\nkind = "torus"\ndims = ["2"]', "dims[0] must be a whole number"),
        ('hosts = 4\nbandwidth = "1gbit"\n[topology]\nkind = "bcube"\nn = 2', "with k = 1, nics must be 2, got 1"),
        ('hosts = 5\nbandwidth = "1gbit"\n[topology]\nkind = "bcube"\nn = 2', "holds 4 hosts, but there are 5"),
        (
            f"hosts = 9\nbandwidth = 1e9\n{DRAGONFLY}",
            "hold 8 hosts, but there are 9",
        ),
        (
            'hosts = 2\nbandwidth = 1e9\n[topology]\nkind = "fat_tree"\nhosts_per_leaf = 2\noversubscription = -1',
            "oversubscription must be a number from 0.01 to 1000, got -1",
        ),
        (
            'hosts = 2\nbandwidth = 1e9\n[topology]\nkind = "fat_tree"\nhosts_per_leaf = 2\npod_oversubscription = 2',
            "no effect without leaves_per_pod",
        ),
        (
            f'hosts = 8\nbandwidth = 1e9\n{DRAGONFLY}local = "-1gbit"',
            "between 1kbit and 10tbit",
        ),
        (
            "hosts = 2\nbandwidth = 1e9\nnics = 2\ndevices_per_host = 3\n[inside]\nbandwidth = 1e9",
            "3 devices cannot share 2 NICs evenly",
        ),
        ('hosts = 2\nbandwidth = 1e9\nnics = 2\n[topology]\nkind = "rail"', "at most one NIC per device"),
        ('hosts = 2\nbandwidth = 1e9\n[measured]\n[[measured.curve]]\nkind = "send"', "world_size is missing"),
        (
            'hosts = 2\nbandwidth = 1e9\n[[measured.curve]]\nkind = "sned"\nworld_size = 2\nsizes = [1]\nseconds = [1]',
            'Did you mean "send"?',
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(text: str, told: str) -> None:
    with pytest.raises(LaconicError) as caught:
        Cluster.from_toml(text)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text(alphabet='hostsbandwidthdelaylossrackindexuplink=[]"0123456789.%mg\n ', max_size=80))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(LaconicError):
        Cluster.from_toml(text)


@pytest.mark.slow
@given(clusters())
def test_every_cluster_reads_back_from_its_toml(cluster: Cluster) -> None:
    assert Cluster.from_toml(cluster.to_toml()) == cluster
    table = tomllib.loads(cluster.to_toml("outer.inner"))["outer"]["inner"]
    assert Cluster.from_table(table) == cluster
    assert "\n" not in cluster.describe().replace(cluster.source, "")


def test_everything_at_once() -> None:
    cluster = Cluster.from_toml(
        """
        name = "small"
        source = "Made up."
        hosts = 8
        bandwidth = "25gbit"
        devices_per_host = 4
        nics = 2
        [inside]
        bandwidth = "200gbit"
        delay = "1us"
        [topology]
        kind = "fat_tree"
        hosts_per_leaf = 4
        oversubscription = 4
        delay = "500ns"
        [[host]]
        index = 3
        speed = 0.5
        [[host]]
        index = 4
        bandwidth = "10gbit"
        """
    )
    link = Link(bandwidth_bps=25e9)
    assert cluster == Cluster(
        links=(link,) * 4 + (Link(bandwidth_bps=10e9),) + (link,) * 3,
        topology=FatTree(hosts_per_leaf=4, oversubscription=4.0, delay_s=5e-7),
        devices_per_host=4,
        inside=Link(bandwidth_bps=200e9, delay_s=1e-6),
        nics=2,
        speeds=(1.0, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0),
        name="small",
        source="Made up.",
    )
    assert (cluster.num_hosts, cluster.num_devices) == (8, 32)
    assert cluster.describe() == (
        "8 hosts of 4 devices (inside 200gbit, delay 1us) at 2 x 25gbit; host 4: 10gbit; host 3: computes at 0.5; "
        "fat tree, 4 hosts per leaf, 4:1"
    )


def test_python_objects_are_checked_as_strictly() -> None:
    for make, told in (
        (lambda: Cluster(links=(LINK, LINK), speeds=(1.0,)), "one speed per host, got 1 for 2 hosts"),
        (lambda: Cluster(links=(LINK,), speeds=(float("nan"),)), "got nan"),
        (lambda: Cluster(links=(LINK,), devices_per_host=0), "devices_per_host must be a whole number from 1"),
        (lambda: Cluster(links=(LINK,) * 3, topology=Racks(sizes=(1, 1), uplinks=(LINK, LINK))), "hold 2 hosts"),
        (lambda: Racks(sizes=(1, 2), uplinks=(LINK,)), "racks need an uplink each"),
        (lambda: Racks(sizes=(1, 2), members=((0, 1), (2,)), uplinks=(LINK, LINK)), "but members lists"),
        (lambda: Cluster.in_racks(8, LINK, racks=3), "8 hosts cannot fill 3 racks evenly"),
        (lambda: Cluster.in_racks(8, LINK, racks=2, oversubscription=0), "oversubscription must be a number"),
        (lambda: Torus(dims=()), "1 to 3 entries"),
        (lambda: Torus(dims=(1, 4)), "from 2 to 65536, got 1"),
        (lambda: Rail(oversubscription=float("nan")), "oversubscription must be a number"),
        (lambda: Link(bandwidth_bps=-1.0), "between 1kbit and 10tbit"),
        (lambda: Cluster.uniform(65_537, LINK), "between 1 and 65536"),
    ):
        with pytest.raises(UsageError) as caught:
            make()
        assert told in str(caught.value)


def test_more_hosts_of_the_same_kind() -> None:
    cluster = Cluster(links=(LINK,) * 4, topology=FatTree(hosts_per_leaf=2), speeds=(0.5,) * 4)
    assert cluster.resized(64) == Cluster(links=(LINK,) * 64, topology=FatTree(hosts_per_leaf=2), speeds=(0.5,) * 64)
    with pytest.raises(UsageError, match="hosts of this cluster differ"):
        Cluster.uniform(2, LINK, {1: Link(bandwidth_bps=1e8)}).resized(3)
    with pytest.raises(UsageError, match="hold 4 hosts, but there are 8"):
        Cluster(links=(LINK,) * 4, topology=Torus(dims=(2, 2))).resized(8)


def test_the_page_about_clusters_says_what_is() -> None:
    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        Cluster.from_toml(block)
    assert {name for name in PRESETS if f"\n| `{name}` |" in page} == set(PRESETS)
    assert {kind for kind in TOPOLOGIES if f"\n| `{kind}` |" in page} == set(TOPOLOGIES)
    for topology in TOPOLOGIES.values():
        for field in fields(topology):
            key = field.name.removesuffix("_s").removesuffix("_bps")
            assert f"`{key}`" in page or topology is Racks, (topology.kind, key)


def test_a_file_that_is_not_there(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the cluster file .*: No such file"):
        Cluster.load(tmp_path / "none.toml")
