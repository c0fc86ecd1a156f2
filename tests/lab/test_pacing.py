"""Links held back in software: who gets which rate, what is refused, and that it is always said."""

from __future__ import annotations

import sys

import pytest

from laconic.cli import main
from laconic.cluster import Cluster, Link, Racks, Torus
from laconic.errors import UsageError
from laconic.lab.capabilities import Capabilities
from laconic.lab.pacing import choose_links, places_paced

ALL = Capabilities(privilege="root", veth=True, bridge=True, tbf=True)
NOTHING = Capabilities(privilege="none", reason="unshare: Operation not permitted")
LINK = Link(bandwidth_bps=1e8)
SHOW = "import os; print(*(os.environ[name] for name in ('RANK', 'GROUP_RANK', 'LOCAL_RANK', 'LACONIC_PACE')))"


def test_which_links_a_run_gets() -> None:
    assert choose_links("auto", ALL) == "shaped"
    assert choose_links("shaped", ALL) == "shaped"
    assert choose_links("paced", ALL) == "paced"
    assert choose_links("auto", NOTHING) == "paced"
    assert choose_links("paced", NOTHING) == "paced"
    with pytest.raises(UsageError, match=r"shaped links need virtual hosts.*unshare.*--links paced"):
        choose_links("shaped", NOTHING)


def test_every_rank_gets_its_share_of_its_hosts_link() -> None:
    cluster = Cluster.uniform(2, Link(bandwidth_bps=100e6), {1: Link(bandwidth_bps=10e6)})
    places = places_paced(cluster, ranks_per_host=2)
    names = ("RANK", "GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LACONIC_PACE")
    found = [tuple(place.environment[name] for name in names) for place in places]
    assert found == [
        ("0", "0", "0", "4", "2", "50mbit"),
        ("1", "0", "1", "4", "2", "50mbit"),
        ("2", "1", "0", "4", "2", "5mbit"),
        ("3", "1", "1", "4", "2", "5mbit"),
    ]
    assert len({place.environment["MASTER_PORT"] for place in places}) == 1
    # The kernel counts no link of a rank's own here, and nobody must think that it does.
    assert "GLOO_SOCKET_IFNAME" not in places[0].environment


@pytest.mark.parametrize(
    ("cluster", "told"),
    [
        (Cluster.uniform(2, Link(bandwidth_bps=1e8, delay_s=0.01)), "no delay or loss; host 0 has 100mbit, delay 10ms"),
        (Cluster.uniform(2, Link(bandwidth_bps=1e8), {1: Link(bandwidth_bps=1e8, loss_ratio=0.1)}), "host 1 has"),
        (Cluster(links=(LINK,), topology=Racks(sizes=(1,), uplinks=(LINK,))), "racks are not possible"),
        (Cluster.uniform(251, LINK), "at most 250 hosts, got 251"),
        (Cluster(links=(LINK,) * 4, topology=Torus(dims=(2, 2))), "one switch or by racks, got torus of 2 x 2"),
        (Cluster(links=(LINK,), devices_per_host=2, inside=LINK), "one device and one NIC per host, got 2 and 1"),
        (Cluster(links=(LINK, LINK), speeds=(1.0, 0.5)), "cannot make a host compute slower"),
    ],
)
def test_what_software_cannot_imitate_is_refused(cluster: Cluster, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        places_paced(cluster)


@pytest.mark.dist
@pytest.mark.timeout(60)
def test_the_command_says_that_links_are_paced(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--hosts", "2", "--link", "1=10mbit", "--links", "paced", "--", sys.executable, "-c", SHOW]
    assert main(["lab", *words]) == 0
    captured = capfd.readouterr()
    assert "[1] 1 1 0 10mbit\n" in captured.out
    assert "[0] 0 0 0 100mbit\n" in captured.out
    told = "only laconic's own transport is paced; a script's own traffic through torch.distributed is not"
    assert f"lab: 2 hosts at 100mbit; host 1: 10mbit (paced: {told})\n" in captured.err
    summary = " ".join(captured.out.split())
    assert f"in the lab; links were paced: {told} host link 0 100mbit 1 10mbit" in summary


@pytest.mark.dist
@pytest.mark.timeout(60)
def test_without_virtual_hosts_auto_is_paced_and_says_why(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laconic.cli.lab.detect_capabilities", lambda: NOTHING)
    assert main(["lab", "--hosts", "1", "--", "true"]) == 0
    assert "(paced: " in (told := capfd.readouterr().err)
    assert "virtual hosts are not possible here: unshare: Operation not permitted" in told
    assert main(["lab", "--hosts", "1", "--delay", "5ms", "--", "true"]) == 2
    assert "no delay or loss" in capfd.readouterr().err
    assert main(["lab", "--links", "shaped", "--", "true"]) == 2
    assert "shaped links need virtual hosts" in capfd.readouterr().err
