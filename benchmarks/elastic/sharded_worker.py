"""The training script of the benchmark for sharded models: two ranks hold one copy, and FSDP2 averages over them."""

from __future__ import annotations

import faulthandler
import hashlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import laconic
from benchmarks.elastic.worker import BATCH, CLASSES, INPUTS, SEED, Samples, agreed, digest
from laconic.runtime.shards import local

RANKS_PER_REPLICA = 2
HIDDEN = 63
"""An odd number: the shards of a tensor differ in size."""


def make_model() -> nn.Sequential:
    """The same in every process, not sharded yet."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """After sharding."""
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def train(strategy: str, folder: str, sleep_s: float = 0.01, last_step: int | None = None) -> None:
    """Train until the file "stop" in `folder` names a step that has been made, or until `last_step`."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    dist.init_process_group("gloo")
    model = make_model()
    for part in (model[0], model[2], model):
        fully_shard(part)
    optimizer = make_optimizer(model)
    place = Path(folder)
    log = laconic.EventLog(place / f"{os.environ['LACONIC_WORKER']}.jsonl")
    elastic = laconic.Elastic(min_ranks=1, max_ranks=8)
    loader = DataLoader(Samples(), batch_size=BATCH, shuffle=True)
    with laconic.attach(model, optimizer, strategy, elastic=elastic, timeout_s=60, events=log) as session:
        every = session.strategy.synchronization.interval
        for inputs, targets in session.batches(loader, epochs=10**6, seed=SEED):
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            if session.step % every == 0:
                if every == 1:
                    states = [optimizer.state[p] for p in model.parameters()]
                    fields = [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]
                    tensors = [local(tensor) for tensor in (*model.parameters(), *fields)]
                else:
                    assert session._hooks is not None, "an elastic session has hooks"
                    tensors = agreed(session._hooks.bucket_states(), session.strategy)
                said = whole_digest(digest(tensors))
                data = {"digest": said, "wall_s": time.time(), "view": session.views[-1].view.number}
                log.write(laconic.Event("digest", time.monotonic(), session.rank, session.step, 0.0, {**data}))
            time.sleep(sleep_s)
            if last_step is None and stops(place):
                last_step = int((place / "stop").read_text())
            if last_step is not None and session.step >= last_step:
                break
    dist.destroy_process_group()


def whole_digest(mine: str) -> str:
    """One for all ranks of a replica, from the digest of each."""
    own = torch.frombuffer(bytearray(mine.encode()), dtype=torch.uint8)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    return joined(bytes(row.tolist()).decode() for row in rows)


def joined(digests: Iterable[str]) -> str:
    """The digest of a replica, from those of its ranks."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


def stops(place: Path) -> bool:
    """Whether the ranks of this replica have been told to stop: all of them find it in the same step."""
    found = torch.tensor([int((place / "stop").exists())])
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return bool(found.item())
