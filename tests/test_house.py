"""The house keeps its shape: what the import contract cannot say."""

from __future__ import annotations

import ast
import dataclasses
import re
from functools import cache
from pathlib import Path

import pytest

import laconic
from laconic.settings import Method
from laconic.strategy import AXES

pytestmark = pytest.mark.xdist_group("sources")  # in one worker, which reads each file once
SOURCE = Path(laconic.__file__).parent
NO_METHODS = ("__init__", "contract", "traits")
"""Files of a room that hold what its methods share."""
HEAVY = {"rich", "tyro", "plotly", "jinja2", "numba", "pyroute2"}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("axis", AXES)
def test_one_method_never_imports_another(axis: str) -> None:
    methods = [path for path in (SOURCE / axis).glob("*.py") if path.stem not in NO_METHODS]
    siblings = {f"laconic.{axis}", *(f"laconic.{axis}.{path.stem}" for path in methods)}
    # A setting that holds a method has one as its default, and that must come from somewhere.
    defaults = {
        (method.__module__, type(field.default).__module__)
        for method in AXES[axis]
        for field in dataclasses.fields(method)
        if isinstance(field.default, Method)
    }
    for path in methods:
        imported = siblings & _imports(path)
        assert imported <= {there for here, there in defaults if here == f"laconic.{axis}.{path.stem}"}, path


@pytest.mark.parametrize("axis", AXES)
def test_every_method_file_is_registered(axis: str) -> None:
    modules = {method.__module__ for method in AXES[axis]}
    files = {f"laconic.{axis}.{path.stem}" for path in (SOURCE / axis).glob("*.py")}
    assert files - {f"laconic.{axis}.{name}" for name in NO_METHODS} == modules


def test_heavy_packages_are_imported_only_by_commands_and_the_lab() -> None:
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0]
        heavy = {name for name in _imports(path) if name.partition(".")[0] in HEAVY}
        if path.parent == SOURCE / "compression" / "kernels" / "numba_cpu":  # imported when first used
            heavy -= {"numba"}
        assert not heavy or room in ("cli", "lab", "report"), f"{path} imports {heavy}"


def test_no_pickle_anywhere() -> None:
    for path in SOURCE.rglob("*.py"):
        assert not {"pickle", "cloudpickle", "dill"} & _imports(path), path
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(broadcast|scatter|send|recv)_object_list|gather_object", text), path


def test_no_bare_name_files() -> None:
    vague = {"utils", "util", "common", "helpers", "helper", "misc", "manager"}
    assert not [path for path in SOURCE.rglob("*.py") if path.stem in vague]


def _classes() -> dict[str, list[tuple[Path, ast.ClassDef]]]:
    found: dict[str, list[tuple[Path, ast.ClassDef]]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append((path, node))
    return found


def _documented(classes: dict[str, list[tuple[Path, ast.ClassDef]]], name: str, method: str) -> bool:
    """Whether a class of this name, or one that it derives from, has a docstring for a method."""
    for _, node in classes.get(name, ()):
        for member in node.body:
            if isinstance(member, ast.FunctionDef) and member.name == method and ast.get_docstring(member):
                return True
        bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
        if any(_documented(classes, base, method) for base in bases):
            return True
    return False


def test_a_method_has_a_docstring_unless_a_contract_has_it() -> None:
    """The contract is a base class, or a Protocol, which a class need not derive from."""
    classes = _classes()
    protocols = {
        member.name
        for places in classes.values()
        for _, node in places
        if any(ast.unparse(base).partition("[")[0] == "Protocol" for base in node.bases)
        for member in node.body
        if isinstance(member, ast.FunctionDef) and ast.get_docstring(member)
    }
    missing = [
        f"{path.relative_to(SOURCE)}:{member.lineno} {name}.{member.name}"
        for name, places in classes.items()
        for path, node in places
        for member in node.body
        if isinstance(member, ast.FunctionDef)
        and not member.name.startswith("_")
        and not name.startswith("_")
        and not ast.get_docstring(member)
        and not {"overload", "setter"} & {ast.unparse(mark).rpartition(".")[2] for mark in member.decorator_list}
        and member.name not in protocols
        and not _documented(classes, name, member.name)
    ]
    assert not missing, "\n".join(missing)


def test_no_docstring_only_points_elsewhere() -> None:
    pointing = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and re.match(r"(See|As) `?[\w.]+`?(\(\))?[.;]", ast.get_docstring(node) or "")
    ]
    assert not pointing, f"say what this one does, or leave the docstring out: {pointing}"
