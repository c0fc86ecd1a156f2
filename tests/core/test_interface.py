"""The job's interface: named, prefixed, excluded, or found by the way to the master."""

from __future__ import annotations

import socket

import pytest

from laconic.core.interface import local_address
from laconic.errors import AttachError

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
@pytest.mark.parametrize("name", ["lo", "=lo", "lo,eth0", " lo "])
def test_a_named_interface(variable: str, name: str) -> None:
    assert local_address(environment={variable: name, "MASTER_ADDR": "no.such.host.invalid"}) == "127.0.0.1"


def test_a_name_that_begins_so_unless_exactness_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "other")])
    assert local_address(environment={"NCCL_SOCKET_IFNAME": "l"}) == "127.0.0.1"
    with pytest.raises(AttachError, match='NCCL_SOCKET_IFNAME names interface "=l", but this host has lo, other'):
        local_address(environment={"NCCL_SOCKET_IFNAME": "=l"})


def test_an_interface_that_is_not_here() -> None:
    with pytest.raises(AttachError, match=r'GLOO_SOCKET_IFNAME names interface "nix0", but this host has .*lo'):
        local_address(environment={"GLOO_SOCKET_IFNAME": "nix0"})


def test_an_interface_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "nix0")])
    with pytest.raises(AttachError, match=r"interface nix0, named by .* GLOO_SOCKET_IFNAME, has no IPv4 address"):
        local_address(environment={"GLOO_SOCKET_IFNAME": "nix0"})


def test_the_way_to_the_master() -> None:
    assert local_address(environment={"MASTER_ADDR": "localhost"}) == "127.0.0.1"
    assert local_address("127.0.0.5", environment={"MASTER_ADDR": "no.such.host.invalid"}) == "127.0.0.1"
    assert local_address(environment={"NCCL_SOCKET_IFNAME": "^lo,docker", "MASTER_ADDR": "127.0.0.1"}) == "127.0.0.1"


def test_a_master_that_cannot_be_found() -> None:
    with pytest.raises(AttachError, match=r'no route to the master host "no.such.host.invalid" .*GLOO_'):
        local_address(environment={"MASTER_ADDR": "no.such.host.invalid"})


def test_no_hint_at_all() -> None:
    assert local_address(environment={}) == "127.0.0.1"
