"""What `import laconic` does not do, and what a built package holds."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import laconic

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ["rich", "tyro", "plotly", "jinja2", "numba", "pyroute2"]

# torch and numpy read the environment and start threads as they please; what counts is what laconic adds.
PROBE = """
import json, os, sys, threading
import numpy, torch
sys.path.insert(0, sys.argv[1])
before_modules, before_threads = set(sys.modules), threading.active_count()

def tasks():
    return sorted(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else []

class Recording(type(os.environ)):
    def __init__(self):
        real = os.environ
        super().__init__(real._data, real.encodekey, real.decodekey, real.encodevalue, real.decodevalue)
        self.read = []
    def __getitem__(self, key):
        self.read.append(key)
        return super().__getitem__(key)
    def __contains__(self, key):
        self.read.append(key)
        return super().__contains__(key)
    def __iter__(self):
        self.read.append("(all of them)")
        return super().__iter__()

recording, before_tasks = Recording(), tasks()
os.environ = recording
os.environ.get("PROBE_WORKS"), os.getenv("PROBE_WORKS_TOO")
import laconic
json.dump(
    {
        "file": laconic.__file__,
        "read": recording.read,
        "threads": threading.active_count() - before_threads,
        "tasks": [before_tasks, tasks()],
        "modules": sorted(set(sys.modules) - before_modules),
        "process_group": torch.distributed.is_initialized(),
    },
    sys.stdout,
)
"""


@pytest.fixture(scope="module")
def imported() -> dict:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(ROOT / "src")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "importing says nothing"
    return json.loads(done.stdout)


pytestmark = pytest.mark.timeout(90)


def test_the_probe_looks_at_this_package(imported: dict) -> None:
    assert imported["file"] == laconic.__file__
    assert {"laconic", "laconic.strategy", "laconic.core.in_process"} <= set(imported["modules"])


def test_no_thread_is_started(imported: dict) -> None:
    assert imported["threads"] == 0
    before, after = imported["tasks"]
    assert before == after


def test_no_environment_variable_is_read(imported: dict) -> None:
    assert imported["read"][:2] == ["PROBE_WORKS", "PROBE_WORKS_TOO"], "the probe itself works"
    assert imported["read"][2:] == []


def test_nothing_heavy_is_imported(imported: dict) -> None:
    tops = {name.split(".")[0] for name in imported["modules"]}
    assert tops.isdisjoint(HEAVY)


def test_only_torch_numpy_and_the_standard_library_are_imported(imported: dict) -> None:
    tops = {name.split(".")[0] for name in imported["modules"]}
    assert tops - {"laconic", "torch", "numpy"} <= set(sys.stdlib_module_names)


def test_no_process_group_is_made(imported: dict) -> None:
    assert imported["process_group"] is False


def test_public_names_are_there() -> None:
    assert {"attach", "Session", "Strategy", "InProcessCluster", "LaconicError"} <= set(laconic.__all__)
    for name in laconic.__all__:
        assert getattr(laconic, name) is not None
    assert laconic.__version__ == importlib.metadata.version("laconic")


def test_the_wheel_holds_every_module_and_py_typed(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("laconic-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        shipped = set(archive.namelist())
        metadata = next(archive.read(name).decode() for name in shipped if name.endswith("METADATA"))
    assert "laconic/py.typed" in shipped
    source = ROOT / "src"
    modules = {str(file.relative_to(source)) for file in source.rglob("*.py")}
    assert modules <= shipped
    assert not [name for name in shipped if name.startswith("tests/")]
    assert "License-Expression: Apache-2.0" in metadata
