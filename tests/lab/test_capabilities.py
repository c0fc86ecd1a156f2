"""What the machine allows, tried for real; and that trying leaves nothing behind."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from laconic.lab import capabilities
from laconic.lab.capabilities import Capabilities, detect_capabilities

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="network namespaces need Linux")


def network() -> tuple[list[str], str]:
    """The interfaces of this namespace, and which namespace it is."""
    return sorted(name for _, name in socket.if_nameindex()), str(Path("/proc/self/ns/net").readlink())


@pytest.mark.lab
def test_root_can_make_virtual_hosts_and_nothing_is_left_behind() -> None:
    pytest.importorskip("pyroute2")
    before = network()
    found = detect_capabilities()
    assert network() == before
    if os.geteuid() == 0 and found.privilege == "root":
        assert found.veth, found.reason
        assert found.bridge, found.reason
    parts = {name: getattr(found, name) for name in ("veth", "bridge", "tbf", "htb", "netem", "nftables")}
    if found.privilege == "none":
        assert not any(parts.values())
    assert bool(found.reason) == (found.privilege == "none" or not all(parts.values()))
    assert all(name in found.reason for name, works in parts.items() if not works and found.privilege != "none")
    assert found.virtual_hosts == (found.veth and found.bridge and (found.tbf or found.htb))


@pytest.mark.lab
@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a capability to drop")
def test_root_without_the_capability_is_not_called_root() -> None:
    # As in an ordinary container: prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN), which takes effect at the next exec.
    drop = "import ctypes, os, sys; ctypes.CDLL(None).prctl(24, 21, 0, 0, 0); os.execv(sys.argv[1], sys.argv[1:])"
    script = str(Path(capabilities.__file__))
    child = subprocess.run(
        [sys.executable, "-c", drop, sys.executable, "-P", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    found = Capabilities(**json.loads(child.stdout))
    assert found.privilege in ("user_namespace", "none")
    assert found.veth == (found.privilege == "user_namespace"), found.reason


def test_the_timeout_is_named_when_it_expires() -> None:
    found = detect_capabilities(timeout_s=0.001)
    assert found.privilege == "none"
    assert "timeout_s = 0.001 s" in found.reason


def test_a_child_that_fails_is_a_reason_not_an_exception(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import sys\nsys.exit('it broke')\n", encoding="utf-8")
    monkeypatch.setattr(capabilities, "__file__", str(script))
    assert "status 1: it broke" in detect_capabilities().reason
    script.write_text("print('no json')\n", encoding="utf-8")
    assert "gave no answer" in detect_capabilities().reason


def test_a_refusal_gives_the_kernels_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(flags: int) -> int:
        asked.append(flags)
        ctypes.set_errno(1)
        return -1

    monkeypatch.setattr(capabilities.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(unshare=refuse))
    privilege, reason = capabilities._enter_network_namespace()
    assert privilege == "none"
    assert reason.count("Operation not permitted") == 2
    assert asked == [0x40000000, 0x50000000]


def test_another_system_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities.sys, "platform", "darwin")
    assert detect_capabilities() == Capabilities(
        privilege="none", reason="network namespaces need Linux, this is darwin"
    )


def test_capabilities_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Capabilities(privilege="none").veth = True  # type: ignore[misc]
