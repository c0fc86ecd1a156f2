"""What goes wrong around an aggregator in a process of its own: nothing hangs, and who is gone is named."""

from __future__ import annotations

import pytest

from tests.processes import run_processes

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(120)]


def test_an_aggregator_that_is_killed_is_named() -> None:
    results = run_processes(
        "tests.runtime.servers.ranks:stops",
        world_size=2,
        arguments={"strategy": "bsp / in_network / intsgd", "victim": 0, "how": "kill server"},
        timeout_s=90,
    )
    for result in results:
        assert result.value["error"].startswith("PeerLost")
        assert "server 0 of rank 0 at 127.0.0.1:" in result.value["error"]
        assert "in step 5" in result.value["error"]
        assert result.value["unharmed"]
