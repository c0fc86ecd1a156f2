"""Scripts that are measured: what they must return, and what is told of those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from laconic.errors import UsageError
from laconic.workload.script import load_subject

GOOD = """\
from __future__ import annotations
from dataclasses import dataclass
import torch
from beside import WIDTH

@dataclass
class Batch:
    width: "int"

def make_model(width=WIDTH):
    import beside_too
    model = torch.nn.Linear(Batch(width).width, 2)
    return model, torch.ones(4, 3), lambda model, batch: model(batch).sum()
"""


def written(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    return f"{path}:make_model"


def test_a_script_may_import_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WIDTH = 3\n", encoding="utf-8")
    (tmp_path / "beside_too.py").write_text("", encoding="utf-8")
    subject = load_subject(written(tmp_path, GOOD))
    assert isinstance(subject.model, torch.nn.Linear)
    assert isinstance(subject.batch, torch.Tensor)
    assert subject.loss(subject.model, subject.batch).numel() == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def make_models(): pass", 'has no function "make_model". Did you mean "make_models"?'),
        ("make_model = 3", 'has no function "make_model". Known: none.'),
        ("def make_model(size, *, depth=1): pass", "make_model needs arguments (size), but is called without any."),
        ("def make_model(): return 3", "make_model returned a value of type int. It must return (model, batch, loss)"),
        ("def make_model(): return 3, 4", "returned a tuple of 2."),
        ("def make_model(): return 3, 4, print", "returned int as its model, not a torch.nn.Module."),
        (
            "import torch\ndef make_model(): return torch.nn.Linear(1, 1), 3, torch.nn.MSELoss()",
            "returned MSELoss as its loss, not a function of (model, batch).",
        ),
        ("import nonesuch", "make_model raised in line 1 ModuleNotFoundError: No module named 'nonesuch'"),
        ("x = 1\ndef make_model():\n    return 1 / 0", "raised in line 3 ZeroDivisionError: division by zero"),
        ("def make_model():\n  x = = 3", "raised in line 2 SyntaxError"),
        ("raise SystemExit(3)", "raised in line 1 SystemExit: 3"),
        ("raise ValueError", "raised in line 1 ValueError"),
        ("raise ValueError('a\\nb')", "raised in line 1 ValueError: a b"),
    ],
)
def test_what_goes_wrong_is_told_in_one_line(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_subject(written(tmp_path, text))
    assert told in str(caught.value)
    assert "script.py" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("where", ["script.py", "script.py:", ":make_model", "script.py:make model", ""])
def test_what_names_no_function(where: str) -> None:
    with pytest.raises(UsageError, match=r"Write path/to/script\.py:make_model\."):
        load_subject(where)


def test_no_script(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no script .*none\.py"):
        load_subject(f"{tmp_path}/none.py:make_model")
    (tmp_path / "script.txt").write_text("", encoding="utf-8")
    with pytest.raises(UsageError, match=r"its name must end in \.py"):
        load_subject(f"{tmp_path}/script.txt:make_model")
