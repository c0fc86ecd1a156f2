"""What is chosen is chosen by what methods declare: nobody outside a method's own room asks what class it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import laconic
from laconic.cluster.topologies import TOPOLOGIES
from laconic.core.in_process import InProcessTransport
from laconic.core.paced import PacedTransport
from laconic.core.torch_distributed import TorchTransport
from laconic.strategy import AXES
from laconic.synchronization import Asynchronous, LocalUpdates

SOURCE = Path(laconic.__file__).parent
CONCRETE: list[type] = [
    *(method for registry in AXES.values() for method in registry),
    *TOPOLOGIES.values(),
    *(Asynchronous, LocalUpdates, InProcessTransport, PacedTransport, TorchTransport),
]


def _asked(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of every class that an isinstance or issubclass in a file names."""
    for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            continue
        if call.func.id in {"isinstance", "issubclass"}:
            names = [node.id for node in ast.walk(call.args[1]) if isinstance(node, ast.Name)]
            yield from ((call.lineno, name) for name in names)


def test_no_choice_asks_for_a_concrete_class() -> None:
    rooms = {
        kind.__name__: kind.__module__.split(".")[1] for kind in CONCRETE if kind.__module__.startswith("laconic.")
    }
    assert {"AllReduce", "ParameterServer", "Choco", "LocalUpdates", "Demo", "Fusion", "Racks", "TopK"} <= set(rooms)
    found = [
        f"{path.relative_to(SOURCE)}:{line} asks for {name}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, name in _asked(path)
        if name in rooms and path.relative_to(SOURCE).parts[0] != rooms[name]
    ]
    assert found == [], "declare on the contract what these want to know"
