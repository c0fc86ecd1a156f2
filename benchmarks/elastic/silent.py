"""`python -m benchmarks.elastic.silent`: hosts that are frozen or unplugged, and the time until training goes on.

Four virtual hosts train with one rank each. Again and again one of them is frozen (its processes are stopped, and so is
the agent that watches them) or its cable is pulled, and a few seconds later that is undone; its rank is replaced.
Nothing tells the others but silence. What counts is how long no step was made, less the usual time of one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.elastic.families import FAMILIES

_HOSTS = 4
_EVERY_S, _FOR_S = 20, 3
FAULTS = {"frozen": ("--freeze", "host=1"), "unplugged": ("--cut-link", "2")}
SCRIPT = """
import sys, time
import torch
from torch.utils.data import DataLoader
import laconic
from benchmarks.elastic.worker import BATCH, Samples, make_model

strategy, strikes, step_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
torch.set_num_threads(1)
model, optimizer = make_model()
loader = DataLoader(Samples(), batch_size=BATCH, shuffle=True)
with laconic.attach(model, optimizer, strategy, elastic=laconic.Elastic(min_ranks=2, max_ranks=8)) as session:
    for inputs, targets in session.batches(loader, epochs=10**6):
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(step_s)
        last = session.views[-1]
        if session.world_size == 4 and last.view.number >= 2 * strikes and session.step >= last.step + 20:
            break  # the last host that was away is back
"""


def lost(name: str, strikes: int, step_s: float) -> list[float]:
    """Seconds that each fault has cost."""
    option, where = FAULTS[name]
    laconic = [sys.executable, "-m", "laconic.cli"]
    with tempfile.TemporaryDirectory(prefix="laconic-") as scratch:
        script, folder = Path(scratch) / "train.py", Path(scratch) / "run"
        script.write_text(SCRIPT, encoding="utf-8")
        limit = f"{120 + 2 * strikes * _EVERY_S}s"
        lab = ["lab", "--hosts", str(_HOSTS), "--timeout", limit, "--output", str(folder)]
        fault = [option, f"{where} every={_EVERY_S}s for={_FOR_S}s"]
        training = ["--", str(script), FAMILIES["fusion"], str(strikes), str(step_s)]
        path = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        for command in ([*lab, *fault, *training], ["report", str(folder), "--json"]):
            done = subprocess.run([*laconic, *command], capture_output=True, text=True, env=environment, check=False)
            if done.returncode:
                sys.exit(f"{name}: {(done.stderr or done.stdout)[-1500:]}")
        (run,) = json.loads(done.stdout)["runs"]
    found = [change["lost_s"] for change in run["changes"] if change["died"]]
    if len(found) < strikes:
        sys.exit(f"{name}: ranks died {len(found)} times, not {strikes} times.")
    return found


def main() -> int:
    """One line for each kind of fault; 1 if one took longer than wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strikes", type=int, default=5, help="of each kind")
    parser.add_argument("--step", type=float, default=0.05, help="seconds that a step takes besides this small model")
    parser.add_argument("--wanted", type=float, default=2.5, help="seconds")
    options = parser.parse_args()
    worst = 0.0
    for name in FAULTS:
        found = lost(name, options.strikes, options.step)
        worst = max(worst, *found)
        print(f"{name:10} median {statistics.median(found):.2f} s, worst {max(found):.2f} s: "
              + " ".join(f"{one:.2f}" for one in found), flush=True)  # fmt: skip
    print(f"wanted: at most {options.wanted:g} s; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return 1 if worst > options.wanted else 0


if __name__ == "__main__":
    sys.exit(main())
