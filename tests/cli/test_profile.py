"""`laconic profile`: the example of the documentation, what is kept, and what goes wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from laconic.cli import main
from laconic.strategy import Strategy
from laconic.workload import Workload, workload

PAGE = Path(__file__).resolve().parents[2] / "docs" / "workloads.md"


@pytest.fixture
def script(tmp_path: Path) -> str:
    """The documentation's example."""
    found = re.search(r"```python\n(# mlp\.py\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    path = tmp_path / "mlp.py"
    path.write_text(found[1], encoding="utf-8")
    return f"{path}:make_model"


@pytest.mark.slow
def test_the_example(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "mlp.json"
    compressors = ["--compressor", "int8", "--compressor", "topk(density=0.02) + error_feedback"]
    assert main(["profile", script, "--steps", "2", "--output", str(kept), *compressors]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    job = workload(kept)
    assert (job.name, job.batch, job.num_parameters) == ("mlp:make_model", 32, 273_418)
    assert [tensor.name for tensor in job.tensors] == ["2.bias", "2.weight", "0.bias", "0.weight"]
    assert [layer.name for layer in job.layers] == ["0", "1", "2"]
    # What a strategy prints is what its cost is found by.
    asked = [Strategy.from_table({"compression": text}).compression for text in compressors[1::2]]
    assert [codec.compressor for codec in job.codecs] == [str(compressor) for compressor in asked]
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["layer", "parameters", "forward", "ms", "backward", "ms", "ready", "at", "ms"]
    assert ["total", "273,418", f"{job.forward_s * 1e3:.3f}", f"{job.backward_s * 1e3:.3f}"] in rows
    assert rows[1][:2] == ["0", "263,168"]
    assert rows[1][-1] == f"{job.backward_s * 1e3:.3f}"
    assert "multiplied by" in out
    assert f"Written to {kept}." in out.replace("\n", " ")


def test_json(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", script, "--steps", "1", "--name", "mine", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == ["workload", "forward_factor", "backward_factor", "ready_error_s", "notes"]
    job = Workload.from_json(json.dumps(shown["workload"]))
    assert job.name == "mine"
    assert job.codecs == ()
    assert f"multiplied by {shown['forward_factor']:.3f} forward" in job.source


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere.py:make_model"], "there is no script nowhere.py."),
        (["SCRIPT:make_modle"], 'has no function "make_modle". Did you mean "make_model"?'),
        (["SCRIPT"], "Write path/to/script.py:make_model."),
        (["SCRIPT:make_model", "--steps", "0"], "--steps must be >= 1, got 0."),
        (["SCRIPT:make_model", "--output", "a.txt"], "--output must end in .json, got a.txt."),
        (["SCRIPT:make_model", "--output", "no/such/a.json"], "there is no folder no/such."),
        (["SCRIPT:make_model", "--compressor", "int9"], "int8"),
        (["SCRIPT:make_model", "--compressor", "none + error_feedback"], "error_feedback"),
        (["SCRIPT:make_model", "--device", "tpu"], "--device"),
        ([], "SCRIPT.py:FUNCTION"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_2(
    words: list[str], told: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.replace("SCRIPT", script.partition(":")[0], 1) for word in words]
    assert main(["profile", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("laconic: error: ")
    assert err.count("\n") == 1
    assert told in err


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        ("batch.nonesuch()", "raised in line 3 AttributeError: 'Tensor' object has no attribute 'nonesuch'"),
        ("model(batch)", "the loss must be a tensor with one number and a gradient, got one of shape [4, 2]"),
        ("(model(batch) * 0).detach().sum()", "without a gradient"),
    ],
)
def test_a_loss_that_fails(loss: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.py"
    path.write_text(
        "import torch\ndef make_model():\n"
        f"    return torch.nn.Linear(3, 2), torch.ones(4, 3), lambda model, batch: {loss}\n",
        encoding="utf-8",
    )
    assert main(["profile", f"{path}:make_model"]) == 2
    err = capsys.readouterr().err
    assert f"{path}:make_model" in err
    assert told in err
    assert err.count("\n") == 1
