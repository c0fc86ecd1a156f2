"""Local updates and gossip on real processes over Gloo."""

from __future__ import annotations

import pytest

from tests.processes import run_processes
from tests.runtime.replicas import assert_equal


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(120)
def test_streaming_diloco_and_gossip_over_real_links() -> None:
    """Saved after 18 steps, when two of four parts are on their way, and when parameters are."""
    strategies = [
        "streaming_diloco(period=8, fragments=4, overlap=5) / all_reduce / int4 + error_feedback / fusion",
        "bsp / gossip / none / fusion",
    ]
    results = run_processes(
        "tests.runtime.ranks:replicas_that_differ",
        world_size=2,
        arguments={"strategies": strategies, "steps": 18},
        timeout_s=110,
    )
    for strategy in strategies:
        first, second = (result.value[strategy] for result in results)
        for found in (first, second):
            assert_equal(found["resumed"], found["uninterrupted"])
        assert_equal(first["averaged"], second["averaged"])
        assert first["apart"] == second["apart"]
        assert 0 < first["apart"] < 1
        counted, predicted = first["bytes"]
        if strategy.startswith("bsp"):
            assert counted == predicted
        else:
            # 36 steps are four periods and a half: each part has begun four or five rounds.
            assert 8 / 9 * predicted <= counted <= 10 / 9 * predicted + 36
