"""Settings every test shares."""

from __future__ import annotations

import os

# Two cores are shared by threads and processes that play ranks. Set before torch is loaded: torch.set_num_threads()
# would hold for the main thread alone, and sums formed by another number of threads differ in their last bits.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's store looks up the names of its clients; where there is no name server, that takes 5 s each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# pytest-xdist tells its workers the width of a terminal that they do not have.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.pop("COLUMNS", None)

import hypothesis
import pytest

from tests.processes import warm_up

# The same examples on every machine and in every run: a red build means a change, not bad luck.
hypothesis.settings.register_profile(
    "laconic",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=False,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("laconic")


_COMPARE_BITS = (
    "tests/beside_ddp/",
    "tests/compression/",
    "tests/integrations/",
    "tests/runtime/test_fully_sharded.py",
    "tests/runtime/test_lossless.py",
    "tests/runtime/test_shards.py",
)
"""Tests that start processes and look at results alone: they may be as slow as they like."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Write the marks that say what a test needs into the JUnit report, where .ci/run looks for skipped ones.

    Tests that start processes of their own go to two workers. Those that measure or have a time limit run in turn on
    one of them: two such tests at once would need four cores.
    """
    for item in items:
        for mark in ("dist", "lab", "gpu", "browser"):
            if item.get_closest_marker(mark) is not None:
                item.user_properties.append(("mark", mark))
                group = "compare bits" if item.nodeid.startswith(_COMPARE_BITS) else "processes"
                item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Load what real ranks need beside the tests that come before theirs."""
    if getattr(session.config.option, "loadgroup", False):
        grouped = [item for item in session.items if item.get_closest_marker("xdist_group") is not None]
        # pytest-xdist 3.8.0 does this by an attribute that pytest 9.2 no longer has, and groups had no effect.
        assert all("@" in item.nodeid for item in grouped), "pytest-xdist puts no groups into the names of tests"
    needed = any(item.get_closest_marker(mark) for item in session.items for mark in ("dist", "lab"))
    if needed and not session.config.option.collectonly:
        warm_up()
