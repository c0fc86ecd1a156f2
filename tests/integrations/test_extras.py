"""Integrations are optional: `import laconic` needs none, and a missing package is named."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import laconic

FRAMEWORKS = ("accelerate", "transformers", "lightning")


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delitem(sys.modules, f"laconic.integrations.{name}", raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf'needs {name}: pip install "laconic\[{name}\]"'):
        importlib.import_module(f"laconic.integrations.{name}")


def test_import_laconic_imports_no_framework() -> None:
    code = "import sys, laconic; laconic.attach; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    imported = set(done.stdout.split())
    assert "laconic.runtime" in imported
    assert imported.isdisjoint({*FRAMEWORKS, "laconic.integrations"})


def test_names_on_the_page_exist() -> None:
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    found: set[str] = set()
    for node in [node for block in blocks for node in ast.walk(ast.parse(block))]:
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            path = Path(laconic.__file__).parent.parent / f"{node.module.replace('.', '/')}.py"
            defined = {one.name for one in ast.parse(path.read_text(encoding="utf-8")).body if hasattr(one, "name")}
            assert {alias.name for alias in node.names} <= defined
            found.add(path.stem)
    assert found == set(FRAMEWORKS)


def test_frameworks_are_imported_only_by_integrations() -> None:
    source = Path(laconic.__file__).parent
    found = {
        path.relative_to(source).parts[0]
        for path in source.rglob("*.py")
        if re.search(rf"^\s*(from|import) ({'|'.join(FRAMEWORKS)})\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert found == {"integrations"}
