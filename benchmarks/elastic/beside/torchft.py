"""torchft: after a death, the others leave out the step, and a new worker copies the state of one of them.

Each of the four replica groups is one worker. The timeouts are those of torchft's example for DDP: 5 s for an
all-reduce, 30 s for other operations of a step. Gradients are exchanged as one tensor after the backward pass: in
torchft 0.2.0, an all-reduce that fails inside the backward pass of torchft's DDP ends the worker.
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
    os.environ.setdefault("RUST_LOG", "warn")  # else the lighthouse prints several lines per step
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
            until_s = time.monotonic() + 1.0
            while workers and all(worker.poll() is None for worker in workers.values()) and time.monotonic() < until_s:
                time.sleep(0.001)  # SIGKILL has been sent
            for rank in range(kills.RANKS):
                if rank in workers and workers[rank].poll() is None:
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
    from torchft import Manager, ProcessGroupGloo  # pyrefly: ignore[missing-import]

    torch.set_num_threads(1)
    rank = int(os.environ["REPLICA"])
    model, optimizer = make_model()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=_ALL_REDUCE),
        min_replica_size=2,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"replica-{rank}",
        timeout=_OTHERS,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    samples, noted = Samples(), False
    while True:
        manager.start_quorum()
        optimizer.zero_grad()
        time.sleep(step_s)
        kills.loss_of(model, samples, manager.current_step(), rank).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.view(-1) for gradient in gradients])
        manager.allreduce(flat).wait()
        for gradient, mean in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))
        if not manager.should_commit():
            continue
        optimizer.step()
        kills.note_step(folder, manager.current_step())
        if not noted:
            kills.note_process(folder, rank)
            noted = True


if __name__ == "__main__":
    train(Path(sys.argv[1]), float(sys.argv[2]))
