"""Clusters with some of their figures replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from laconic.cluster import cluster
from laconic.cluster.place import Place
from laconic.errors import UsageError

HOSTS = """
hosts = 4
bandwidth = "10gbit"
"""
PROBED = """
hosts = 2
bandwidth = "1gbit"

[measured]
transport = "made up"

[[measured.curve]]
kind = "all_reduce"
world_size = 2
sizes = [1000, 1000000]
seconds = [0.001, 0.02]
"""
UNEQUAL = """
hosts = 4
bandwidth = "10gbit"

[[host]]
index = 1
bandwidth = "1gbit"
"""


def test_a_known_cluster_gets_as_many_hosts_as_workers_need() -> None:
    assert Place(cluster="ethernet-1g").setting().workers == 8
    assert Place(cluster="ethernet-1g").setting(100).cluster.num_hosts == 100
    found = Place(cluster="cloud-100g").setting(20)
    assert (found.workers, found.cluster.num_hosts, found.cluster.devices_per_host) == (20, 3, 8)
    assert Place(cluster="ethernet-1g", hosts=16).setting(4).cluster.num_hosts == 16


def test_too_many_workers_for_the_hosts_that_are_named_are_refused() -> None:
    with pytest.raises(UsageError, match="5 workers need as many devices, but 4 hosts with 1 each have 4"):
        Place(hosts=4).setting(5)


def test_a_file_is_taken_as_it_is_and_grows_if_it_must(tmp_path: Path) -> None:
    path = tmp_path / "rack.toml"
    path.write_text(HOSTS, encoding="utf-8")
    place = Place(cluster=str(path))
    assert [place.setting(workers).cluster.num_hosts for workers in (None, 2, 4, 9)] == [4, 4, 4, 9]
    assert place.setting(2).workers == 2


def test_hosts_that_differ_cannot_become_more(tmp_path: Path) -> None:
    path = tmp_path / "unequal.toml"
    path.write_text(UNEQUAL, encoding="utf-8")
    assert Place(cluster=str(path)).setting(3).cluster.num_hosts == 4
    with pytest.raises(UsageError, match="hosts of this cluster differ"):
        Place(cluster=str(path)).setting(9)


def test_links_are_replaced_and_nothing_else() -> None:
    found = Place(cluster="cloud-100g", bandwidth_bps=25e9, delay_s=1e-3).setting(16)
    assert found.bandwidth_bps == 25e9
    assert {(link.bandwidth_bps, link.delay_s) for link in found.cluster.links} == {(25e9, 1e-3)}
    assert found.cluster.inside == cluster("cloud-100g").inside
    assert Place(cluster="cloud-100g").setting(16).cluster == cluster("cloud-100g", hosts=2)


def test_devices_need_a_link_between_them_which_may_be_assumed_and_is_then_told() -> None:
    place = Place(devices=4)
    made = place.setting(8).cluster
    assert (made.num_hosts, made.devices_per_host) == (2, 4)
    assert made.inside is not None
    assert made.inside.bandwidth_bps == 252e9
    assert "--inside" in place.notes()[0]
    told = Place(devices=4, inside_bps=64e9)
    inside = told.setting(8).cluster.inside
    assert inside is not None
    assert inside.bandwidth_bps == 64e9
    assert told.notes() == []
    alone = Place(cluster="cloud-100g", devices=1).setting(2).cluster
    assert (alone.inside, alone.num_hosts) == (None, 2)
    with pytest.raises(UsageError, match="--inside has no effect"):
        Place(inside_bps=64e9).setting()


def test_what_was_measured_on_other_links_is_not_used_and_that_is_told(tmp_path: Path) -> None:
    path = tmp_path / "probed.toml"
    path.write_text(PROBED, encoding="utf-8")
    assert Place(cluster=str(path)).setting().cluster.measured is not None
    assert Place(cluster=str(path)).notes() == []
    other = Place(cluster=str(path), bandwidth_bps=2e9)
    assert other.setting().cluster.measured is None
    assert "measurements of probed are not used" in other.notes()[0]
