"""What `import laconic` does not do, and what a built package holds."""

from __future__ import annotations

import ast
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
for name in laconic.__all__:
    getattr(laconic, name)
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


def test_the_package_alone_needs_no_torch_and_finds_its_rooms_later() -> None:
    code = (
        "import sys, laconic; assert 'torch' not in sys.modules, 'torch was imported';"
        "assert {'attach', 'Strategy'} <= set(dir(laconic));"
        "assert laconic.runtime.redistribute and laconic.errors.PeerLost;"
        "assert laconic.attach is laconic.runtime.attach"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="module 'laconic' has no attribute 'atach'"):
        laconic.atach  # noqa: B018


def test_type_checkers_and_the_interpreter_find_the_same_names() -> None:
    """The names are imported for type checkers in one block and found at run time through a table."""
    tree = ast.parse(Path(laconic.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    for_checkers = {
        alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert for_checkers == laconic._HOMES


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
