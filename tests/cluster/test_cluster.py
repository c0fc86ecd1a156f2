"""Clusters as data: what TOML means, and what is refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.cluster import Cluster, Link
from laconic.errors import LaconicError, UsageError


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
        ('bandwidth = "1gbit"\n[[rack]]\nhosts = 1', "needs uplink"),
        ('bandwidth = "1gbit"\nrack = 3', "[[rack]] tables"),
        ("hosts = ", "cannot be read"),
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


def test_a_file_that_is_not_there(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the cluster file .*: No such file"):
        Cluster.load(tmp_path / "none.toml")
