"""Examples do what they say."""

from __future__ import annotations

import ast
import difflib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integrations.problem import LOSSLESS, difference
from tests.processes import run_processes

EXAMPLES = Path(__file__).parents[2] / "examples"

# The places that nanogpt.sed looks for, in a training script of the same form.
NANOGPT = """
import os
from contextlib import nullcontext
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed import init_process_group, destroy_process_group
ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group("gloo")
gradient_accumulation_steps = 3
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", enabled=False)
if ddp:
    model = DDP(model)
raw_model = model.module if ddp else model
for step in range(4):
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        torch.manual_seed(100 * step + 10 * micro_step + int(os.environ["RANK"]))
        loss = model(torch.randn(4, 6)).square().mean() / gradient_accumulation_steps
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
if ddp:
    destroy_process_group()
torch.save({"model": raw_model.state_dict()}, result_file)
"""


def with_nanogpt_sed(text: str) -> str:
    sed = shutil.which("sed")
    if sed is None:
        pytest.skip("there is no sed here")
    command = [sed, "-f", str(EXAMPLES / "nanogpt.sed")]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def test_nanogpt_changes_at_most_12_lines() -> None:
    before, after = NANOGPT.splitlines(), with_nanogpt_sed(NANOGPT).splitlines()
    changed = [line for line in difflib.ndiff(before, after) if line.startswith(("+ ", "- "))]
    assert len(changed) <= 12
    ast.parse("\n".join(after))
    assert "DDP(model" not in "\n".join(after)


@pytest.mark.slow
@pytest.mark.dist
def test_nanogpt_trains_as_before_under_a_lossless_strategy() -> None:
    changed, replaced = re.subn(r'"diloco\(period=64\)"', repr(LOSSLESS), with_nanogpt_sed(NANOGPT))
    assert replaced == 1
    before, after = (
        [result.value["model"] for result in run_processes(text, world_size=2, timeout_s=60)]
        for text in (NANOGPT, changed)
    )
    for rank in range(2):
        assert difference(before[rank], after[rank]) <= 1e-6


@pytest.mark.slow
@pytest.mark.dist
def test_the_fsdp2_loop_resumes_between_rounds_with_the_same_losses(tmp_path: Path) -> None:
    text = (EXAMPLES / "pretrain_fsdp2.py").read_text(encoding="utf-8")
    words = ["pretrain_fsdp2.py", "--folder", str(tmp_path), "--steps", "9", "--save-every", "6"]

    def losses(*more: str) -> dict[str, str]:
        first, rest = text.split("from __future__ import annotations\n")
        script = f"from __future__ import annotations\nimport sys\nsys.argv = {[*words, *more]!r}\n{rest}"
        assert first.startswith('"""')
        output = run_processes(script, world_size=4, timeout_s=100)[0].stdout
        return dict(re.findall(r"step (\d+): loss ([\d.]+)", output))

    at_once, resumed = losses(), losses("--resume", "6")
    assert list(at_once) == [str(step) for step in range(1, 10)]
    # Rounds are due after 4 and 8 steps: at step 6 the two groups have different models.
    assert resumed == {step: at_once[step] for step in ("7", "8", "9")}
    assert float(at_once["9"]) < float(at_once["1"])


def test_the_slurm_script_is_bash() -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    script = EXAMPLES / "slurm.sbatch"
    done = subprocess.run([bash, "-n", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (started,) = re.findall(r"examples/\w+\.py --", script.read_text(encoding="utf-8"))
    assert (EXAMPLES.parent / started.removesuffix(" --")).exists()


def test_the_ray_example_is_python_and_wraps_nothing() -> None:
    tree = ast.parse((EXAMPLES / "ray_train.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    (prepare,) = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "prepare_model"]
    assert {word.arg: ast.literal_eval(word.value) for word in prepare.keywords} == {"parallel_strategy": None}
