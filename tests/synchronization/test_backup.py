"""Backup workers: settings and combinations that are refused, by name."""

from __future__ import annotations

import pytest

from laconic.errors import AttachError, IllegalCombination, InvalidSetting
from laconic.strategy import Strategy
from laconic.synchronization import Backup


@pytest.mark.parametrize(("workers", "spare", "first"), [(2, 1, 1), (4, 1, 3), (8, 3, 5), (100, 99, 1)])
def test_all_but_the_spare_workers_make_an_update(workers: int, spare: int, first: int) -> None:
    assert Backup(spare=spare).num_first(workers) == first


def test_settings_without_an_effect_are_refused() -> None:
    with pytest.raises(InvalidSetting, match=r'spare must be a whole number >= 1, got 0.*"bsp / parameter_server"'):
        Backup(spare=0)
    for workers in (1, 3):
        with pytest.raises(AttachError, match=rf"backup.spare must be < the number of workers \({workers}\), got 3"):
            Backup(spare=3).num_first(workers)


@pytest.mark.parametrize(
    "architecture",
    ["parameter_server", "parameter_server(shards=2)", 'parameter_server(hosts="10.0.0.5:1|10.0.0.6:1")'],
)
def test_one_server_must_decide(architecture: str) -> None:
    with pytest.raises(IllegalCombination, match=r"needs one server .* has several") as caught:
        Strategy.parse(f"backup / {architecture}")
    assert '"backup / parameter_server(shards=1) / none / fusion"' in str(caught.value)
    assert Strategy.parse('backup / parameter_server(hosts="10.0.0.5:1")')


@pytest.mark.parametrize("architecture", ["all_reduce", "gossip", "in_network", "sharded"])
def test_architectures_without_servers_that_hold_parameters_are_refused(architecture: str) -> None:
    with pytest.raises(IllegalCombination) as caught:
        Strategy.parse(f"backup / {architecture}")
    assert "backup / parameter_server(shards=1)" in str(caught.value)


def test_by_itself_it_takes_one_server() -> None:
    assert str(Strategy.parse("backup")) == "backup / parameter_server(shards=1) / none / fusion"
