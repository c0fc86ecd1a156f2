"""Settings every test shares."""

from __future__ import annotations

import os

# Two cores are shared by threads and processes that play ranks. Set before torch is loaded: torch.set_num_threads()
# would hold for the main thread alone, and sums formed by another number of threads differ in their last bits.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's store looks up the names of its clients; where there is no name server, that takes 5 s each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Write the marks that say what a test needs into the JUnit report, where .ci/run looks for skipped ones."""
    for item in items:
        for mark in ("dist", "lab", "gpu", "browser"):
            if item.get_closest_marker(mark) is not None:
                item.user_properties.append(("mark", mark))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Load what real ranks need beside the tests that come before theirs."""
    needed = any(item.get_closest_marker(mark) for item in session.items for mark in ("dist", "lab"))
    if needed and not session.config.option.collectonly:
        warm_up()
