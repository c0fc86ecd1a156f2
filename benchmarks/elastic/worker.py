"""The training script of the benchmark: a small model, and a line in a file for every batch, step and view."""

from __future__ import annotations

import faulthandler
import hashlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import laconic
from laconic.core.stateful import BucketState

INPUTS, CLASSES, SAMPLES, HELD_OUT, BATCH, SEED = 32, 8, 960, 2000, 96, 7


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random inputs whose class is the position of the largest of the first few."""

    def __init__(self, count: int = SAMPLES, seed: int = 1) -> None:
        self.inputs = torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(seed))
        self.targets = self.inputs[:, :CLASSES].argmax(1)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


def make_model(device: str = "cpu", seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same in every process."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(INPUTS, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    model = model.to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """A few letters that stand for every bit of these tensors."""
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return whole.hexdigest()[:16]


def agreed(states: Iterable[BucketState], strategy: laconic.Strategy) -> list[torch.Tensor]:
    """What replicas under local updates have in common: the parameters last agreed on, and outer momenta."""
    kinds = strategy.resize()
    return [state.flat[name] for state in states for name in sorted(state.flat) if kinds.get(name) == "copy"]


def train(
    strategy: str,
    folder: str,
    sleep_s: float = 0.01,
    last_step: int | None = None,
    *,
    sample_s: float = 0.0,
    balance: bool = False,
    device: str = "cpu",
    seed: int = 0,
    samples: int = SAMPLES,
) -> None:
    """Train until the file "stop" in `folder` names a step that has been made, or until `last_step`.

    sample_s: how much longer a sample takes than this small model needs. The loss that the first rank ends with, on
    samples never trained on, is in the file "loss".
    """
    torch.set_num_threads(1)
    if device == "cuda":
        # Different host ids make NCCL take ranks on one GPU for ranks on different hosts.
        worker = os.environ["LACONIC_WORKER"]
        os.environ |= {"NCCL_HOSTID": worker, "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
        torch.cuda.set_device(0)
    faulthandler.register(signal.SIGUSR1)  # a worker that hangs can be asked where
    model, optimizer = make_model(device, seed)
    place = Path(folder)
    loader = DataLoader(Samples(samples), batch_size=BATCH, shuffle=True)
    elastic = laconic.Elastic(min_ranks=1, max_ranks=8, balance=balance)
    log = laconic.EventLog(place / f"{os.environ['LACONIC_WORKER']}.jsonl")
    session = laconic.attach(model, optimizer, strategy, elastic=elastic, timeout_s=60, events=log)
    every = session.strategy.synchronization.interval
    with session:
        for inputs, targets in session.batches(loader, epochs=10**6, seed=SEED + seed):
            time.sleep(sample_s * len(inputs))
            nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if session.step % every == 0:
                if every == 1:
                    states = (optimizer.state[p] for p in model.parameters())
                    fields = [fields[key] for fields in states for key in ("exp_avg", "exp_avg_sq", "step")]
                    tensors = [*model.parameters(), *fields]
                else:
                    assert session._hooks is not None, "an elastic session has hooks"
                    tensors = agreed(session._hooks.bucket_states(), session.strategy)
                data = {"digest": digest(tensors), "wall_s": time.time(), "view": session.views[-1].view.number}
                log.write(laconic.Event("digest", time.monotonic(), session.rank, session.step, 0.0, {**data}))
            time.sleep(sleep_s)
            if last_step is None and (place / "stop").exists():
                last_step = int((place / "stop").read_text())
            if last_step is not None and session.step >= last_step:
                break
        if session.rank == 0:
            (place / "loss").write_text(str(held_out(model, device)))


def held_out(model: nn.Module, device: str = "cpu") -> float:
    """The loss on samples never trained on."""
    samples = Samples(HELD_OUT, seed=2)
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(samples.inputs.to(device)), samples.targets.to(device)))
