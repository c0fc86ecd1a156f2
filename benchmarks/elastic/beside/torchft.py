"""torchft's DDP: after a death, the others leave out the step, and a new worker copies the state of one of them.

Each of the four replica groups is one worker, as in torchft's example for DDP, with the timeouts given there: 5 s for
an all-reduce, 30 s for everything else.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.elastic.beside import kills
from benchmarks.elastic.worker import Samples, make_model

_ALL_REDUCE, _OTHERS = timedelta(seconds=5), timedelta(seconds=30)
_JOIN_MS, _TICK_MS = 10_000, 100
_EVERY = 25
"""Steps between two kills, about."""


def seconds_lost(folder: Path, num_kills: int, step_s: float, seed: int, *, heartbeat_s: float) -> list[float]:
    """Seconds from each kill of a worker to the next step; a replacement starts at once."""
    from torchft.coordination import LighthouseServer  # pyrefly: ignore[missing-import]

    folder.mkdir()
    lighthouse = LighthouseServer(
        bind="[::]:0",
        min_replicas=2,
        join_timeout_ms=_JOIN_MS,
        quorum_tick_ms=_TICK_MS,
        heartbeat_timeout_ms=round(1000 * heartbeat_s),
    )
    workers: dict[int, subprocess.Popen[bytes]] = {}
    with (folder / "torchft.log").open("wb") as output:

        def start_those_that_ended() -> None:
            for rank in range(kills.RANKS):
                if rank in workers:
                    try:
                        workers[rank].wait(timeout=0.2)
                    except subprocess.TimeoutExpired:
                        continue
                command = [sys.executable, "-m", "benchmarks.elastic.beside.torchft", str(folder), str(step_s)]
                environment = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address(), "REPLICA": str(rank)}
                workers[rank] = subprocess.Popen(command, stdout=output, stderr=output, env=environment)

        try:
            start_those_that_ended()
            return kills.seconds_lost(folder, num_kills, step_s, seed, every=_EVERY, after=start_those_that_ended)
        finally:
            for worker in workers.values():
                worker.kill()
                worker.wait()
            lighthouse.shutdown()


def train(folder: Path, step_s: float) -> None:
    """What a worker does, until it is ended."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo  # pyrefly: ignore[missing-import]

    torch.set_num_threads(1)
    rank = int(os.environ["REPLICA"])
    kills.note_process(folder, rank)
    model, inner = make_model()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=_ALL_REDUCE),
        min_replica_size=2,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"replica-{rank}",
        timeout=_OTHERS,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    samples = Samples()
    while True:
        step = manager.current_step()
        optimizer.zero_grad()  # also asks who takes part
        time.sleep(step_s)
        kills.loss_of(wrapped, samples, step, rank).backward()
        optimizer.step()
        if manager.current_step() > step:
            kills.note_step(folder, manager.current_step())


if __name__ == "__main__":
    train(Path(sys.argv[1]), float(sys.argv[2]))
