"""Known clusters: their figures, their sources, and how they are found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from laconic.cluster import PRESETS, Cluster, Link, cluster
from laconic.errors import UsageError


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_source_and_can_be_had_in_other_numbers(name: str) -> None:
    usual = cluster(name)
    assert (usual.name, usual.num_hosts) == (name, PRESETS[name].hosts)
    assert usual.source.endswith(".")
    assert len(usual.source) > 40
    for hosts in (2, 17, 64):
        made = cluster(name, hosts)
        assert made.num_hosts == hosts
        assert Cluster.from_toml(made.to_toml()) == made
        fabric = made.fabric()
        first, _ = fabric.routes(np.array([0]), np.array([made.num_devices - 1]))
        assert first[1] >= 2
        assert made.source == usual.source


def test_figures_by_hand() -> None:
    assert cluster("ethernet-25g").links[0].bandwidth_bps == 25e9
    assert cluster("ethernet-1g", 3).links == (Link(bandwidth_bps=1e9, delay_s=25e-6),) * 3
    dgx = cluster("dgx-h100", 2)
    assert dgx.inside is not None
    assert (dgx.nics * dgx.links[0].bytes_per_s, dgx.inside.bytes_per_s) == (400e9, 450e9)
    box = cluster("pcie-box")
    assert box.inside is not None
    assert box.inside.bandwidth_bps == pytest.approx(16 * 16e9 * 128 / 130, rel=0.001)
    assert [len(set(made.rack_of)) for made in (cluster("two-sites"), cluster("ethernet-1g"))] == [2, 0]
    assert cluster("two-sites", 5).rack_of == (0, 0, 0, 1, 1)


def test_a_file_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "room.toml"
    path.write_text('hosts = 2\nbandwidth = "1gbit"', encoding="utf-8")
    assert cluster(path).name == "room"
    assert cluster(str(path), 5).num_hosts == 5
    path.write_text('name = "ours"\nhosts = 2\nbandwidth = "1gbit"\n[[host]]\nindex = 0\nspeed = 2', encoding="utf-8")
    assert cluster(path).name == "ours"
    with pytest.raises(UsageError, match="differ, so their number cannot change from 2 to 5"):
        cluster(path, 5)


@pytest.mark.parametrize(
    ("name", "hosts", "told"),
    [
        ("ethernet-10", None, 'Did you mean "ethernet-10g"'),
        ("none.toml", None, "cannot read the cluster file none.toml"),
        ("two-sites", 1, "at least 2 hosts"),
        ("ethernet-1g", 0, "between 1 and 65536, got 0"),
    ],
)
def test_what_there_is_not(name: str, hosts: int | None, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        cluster(name, hosts)
    assert told in str(caught.value)
