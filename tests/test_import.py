"""What `import laconic` does not do, and what a built package holds."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import get_args

import pytest

import laconic
from laconic.core import frames
from laconic.report import results
from laconic.runtime import checkpoint
from laconic.settings import Kind, Method
from laconic.strategy import AXES

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


pytestmark = [pytest.mark.timeout(90), pytest.mark.xdist_group("sources")]  # one worker tries the imports once


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
        "assert laconic.PeerLost and laconic.TensorBoardSink;"
        "assert 'torch' not in sys.modules, 'errors and sinks need no torch';"
        "assert laconic.runtime.redistribute is laconic.redistribute;"
        "assert laconic.attach is laconic.auto.attach"
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
    at_once = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {*for_checkers, *at_once, "__version__"} - {"TYPE_CHECKING"} == set(laconic.__all__)
    assert len(laconic.__all__) == len(set(laconic.__all__))


def _methods() -> list[type[Method]]:
    """Those of laconic itself; other packages may be installed that register more."""
    methods = [method for registry in AXES.values() for method in registry]
    return [method for method in methods if method.__module__.startswith("laconic.")]


def test_every_error_method_sink_and_contract_is_public() -> None:
    """A new error, method or sink is importable from laconic, or this fails."""
    errors = {
        name
        for name, value in vars(laconic.errors).items()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == "laconic.errors"
    }
    sinks = set(laconic.sinks.__all__)
    methods = {method.__name__ for method in _methods()}
    contracts = {registry.contract.__name__ for registry in AXES.values()}
    for names in (errors, sinks, methods, contracts):
        assert names
        assert names <= set(laconic.__all__)
    for method in _methods():
        assert getattr(laconic, method.__name__) is method


def _documented() -> list[str]:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE)


def test_the_page_of_public_names_has_all_of_them_once() -> None:
    names = _documented()
    assert len(names) == len(set(names))
    assert {name for name in names if "." not in name} == set(laconic.__all__)


@pytest.mark.parametrize("name", [name for name in _documented() if "." in name])
def test_every_documented_name_outside_of_the_package_can_be_imported(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    pytest.importorskip(module.rpartition(".")[2])
    assert getattr(importlib.import_module(module), attribute) is not None


def test_every_documented_kind_of_setting_is_there() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    (kinds,) = re.findall(r"functions of `laconic\.settings`:\n(.*?)\.\n", page, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", kinds)) == set(get_args(Kind))
    for kind in get_args(Kind):
        assert callable(getattr(laconic.settings, kind))


def test_the_page_of_public_names_has_the_names_of_methods_in_text() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(shown) == sorted((method.__name__, method.name) for method in _methods())


def test_the_page_on_stability_names_the_formats_of_this_version() -> None:
    page = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^\| ([^|]+?) \| (\d+) \|", page, re.MULTILINE))
    assert shown == {
        "session state": str(checkpoint.FORMAT),
        "frame between workers and servers": str(frames.VERSION),
        "`results.json` of a run": str(results.FORMAT),
    }


def test_public_names_are_there() -> None:
    assert {"attach", "Session", "Strategy", "InProcessCluster", "LaconicError"} <= set(laconic.__all__)
    for name in laconic.__all__:
        assert getattr(laconic, name) is not None
    assert laconic.__version__ == importlib.metadata.version("laconic")


@pytest.mark.slow
def test_the_wheel_is_small_and_holds_every_file_of_the_package(tmp_path: Path) -> None:
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
    assert wheel.name == f"laconic-{laconic.__version__}-py3-none-any.whl", "no compiler, any platform"
    assert wheel.stat().st_size < 2e6
    with zipfile.ZipFile(wheel) as archive:
        shipped = set(archive.namelist())
        texts = {Path(name).name: archive.read(name).decode() for name in shipped if ".dist-info/" in name}
    source = ROOT / "src"
    files = {str(file.relative_to(source)) for file in source.rglob("*") if file.is_file()}
    needed = {file for file in files if "__pycache__" not in file}
    assert {
        "laconic/py.typed",
        "laconic/cli/catalogue.json",
        "laconic/report/page.html.jinja",
        "laconic/report/page.js",
        "laconic/report/page.css",
    } <= needed
    assert {name for name in shipped if ".dist-info/" not in name} == needed, "all of the package, and nothing else"
    assert "License-Expression: Apache-2.0" in texts["METADATA"]
    assert "laconic = laconic.cli:main" in texts["entry_points.txt"]
    assert "Root-Is-Purelib: true" in texts["WHEEL"]
