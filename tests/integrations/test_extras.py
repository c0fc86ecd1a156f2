"""Integrations are optional: `import laconic` needs none, and a missing package is named."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["accelerate", "transformers", "lightning"])
def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delitem(sys.modules, f"laconic.integrations.{name}", raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf'needs {name}: pip install "laconic\[{name}\]"'):
        importlib.import_module(f"laconic.integrations.{name}")


def test_import_laconic_imports_no_framework() -> None:
    code = "import sys, laconic; print(*{name.split('.')[0] for name in sys.modules}, 'laconic.integrations' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    *imported, integrations = done.stdout.split()
    assert integrations == "False"
    assert {"accelerate", "transformers", "lightning", "ray"}.isdisjoint(imported)
