"""Training scripts of elastic workers whose replicas have two ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.elastic.sharded_worker import make_model, train, whole_digest
from benchmarks.elastic.worker import BATCH, SEED, Samples, digest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

import laconic
from laconic.membership.view import View, ViewBroken
from laconic.runtime.elastic.connections import Connections
from laconic.runtime.elastic.recovery import ElasticRecovery
from laconic.runtime.elastic.vote import Vote
from laconic.runtime.engine import Task
from laconic.runtime.shards import local


def one_rank_of_a_replica_loses_the_view(strategy: str, folder: str, moment: str) -> None:
    """In the seventh unit, at this moment; the other rank of its replica notices nothing.

    If another worker wants to join, the votes of that unit say so.
    """
    vote, hear = ElasticRecovery._vote, ElasticRecovery._heard

    def strikes(recovery: ElasticRecovery) -> bool:
        at_once = recovery.unit == 6 and recovery.view.number == 0
        return at_once and recovery.transport.rank == 1 and dist.get_rank() == 1

    def voted(recovery: ElasticRecovery, what: str, tasks: Sequence[Task] = ()) -> Vote:
        if moment == "a vote for a change" and recovery.unit == 6 and os.environ["LACONIC_WORKER"] == "0.0":
            recovery.member._changing.add(0)
        if moment == "before the vote" and strikes(recovery):
            raise ViewBroken("a connection broke")
        return vote(recovery, what, tasks)

    def heard_it(recovery: ElasticRecovery, vote: Vote) -> tuple[dict[str, int], bool]:
        heard = hear(recovery, vote)
        if moment != "before the vote" and strikes(recovery):
            raise ViewBroken("the answer did not arrive")
        return heard

    ElasticRecovery._vote, ElasticRecovery._heard = voted, heard_it
    train(strategy, folder, last_step=20)


def one_rank_cannot_connect_when_others_leave(strategy: str, folder: str) -> None:
    """One rank of a replica that stays fails to connect to the view in which the ranks that leave hand over."""
    connect = Connections.connect

    def connected(connections: Connections, view: View) -> None:
        name = os.environ["LACONIC_WORKER"]
        mark = Path(folder) / "broken"
        connect(connections, view)
        stays = [other for other in view.members if other not in view.leaving and view.seat_of(other).position == 1]
        if view.leaving and name == stays[0] and not mark.exists():
            mark.touch()
            raise ViewBroken("no connection")

    Connections.connect = connected
    train(strategy, folder)


def one_rank_of_a_joining_replica_misses_the_state(strategy: str, folder: str) -> None:
    """A replica dies; of the one that joins, only one rank receives the state at first."""
    import laconic.runtime.elastic.recovery as module

    share = module.share_state

    def broken(transport, *arguments):
        facts = share(transport, *arguments)
        mark = Path(folder) / "broken"
        if transport.rank > 0 and transport._view.number > 0 and dist.get_rank() == 1 and not mark.exists():
            mark.touch()
            raise ViewBroken("the state did not arrive")
        return facts

    module.share_state = broken
    train(strategy, folder)


def one_rank_raises(strategy: str, folder: str) -> None:
    """The script of one rank has a mistake, which shows after a while."""
    made = ElasticRecovery.step_made

    def step_made(recovery: ElasticRecovery) -> None:
        made(recovery)
        if recovery.unit == 5 and os.environ["LACONIC_WORKER"] == "0.3":
            raise ZeroDivisionError("a mistake in the script")

    ElasticRecovery.step_made = step_made
    train(strategy, folder, last_step=200)


class MeanOfSteps:
    """An average of the parameters over steps, sharded as they are."""

    def __init__(self, model: nn.Module) -> None:
        self.means = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.means[name].lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"means": self.means}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.means = state_dict["means"]


def one_dies(strategy: str, folder: str, tensor_parallel: bool) -> None:
    """One rank dies, and its replica is replaced; an average of the parameters is carried.

    Ranks of tensor parallelism use the same samples. With FSDP2, the model is evaluated after every step.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    if tensor_parallel:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    else:
        fully_shard(model)
    optimizer, mean = torch.optim.AdamW(model.parameters(), lr=2e-3), MeanOfSteps(model)
    place = Path(folder)
    log = laconic.EventLog(place / f"{os.environ['LACONIC_WORKER']}.jsonl")
    loader = DataLoader(Samples(), batch_size=BATCH, shuffle=True)
    elastic = laconic.Elastic(max_ranks=8, carry=[mean])
    with laconic.attach(model, optimizer, strategy, elastic=elastic, timeout_s=60, events=log) as session:
        for inputs, targets in session.batches(loader, epochs=10**6, seed=SEED):
            parts = session.world_size * (1 if tensor_parallel else dist.get_world_size())
            assert len(inputs) == BATCH // parts
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            data = {
                "digest": whole_digest(digest(map(local, (*model.parameters(), *mean.means.values())))),
                "wall_s": time.time(),
                "view": session.views[-1].view.number,
            }
            log.write(laconic.Event("digest", time.monotonic(), session.rank, session.step, 0.0, {**data}))
            mean.update(model)
            if not tensor_parallel:
                with torch.no_grad():
                    model(inputs)
            if session.step == 6 and session.views[-1].view.number == 0 and os.environ["LACONIC_WORKER"] == "0.5":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.02)
            joined = [change.step for change in session.views if change.view.number and change.view.fresh]
            if joined and session.step >= 10 + max(joined):
                break
    dist.destroy_process_group()


def refused(strategy: str, folder: str, sharded: bool, batch_size: int = BATCH) -> None:
    """What attach or session.batches says of a mistake is written to a file."""
    dist.init_process_group("gloo")
    model = make_model()
    if sharded:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    try:
        with laconic.attach(model, optimizer, strategy, elastic=laconic.Elastic(min_ranks=1), timeout_s=60) as session:
            session.batches(DataLoader(Samples(), batch_size=batch_size))
    except laconic.LaconicError as error:
        (Path(folder) / f"{os.environ['LACONIC_WORKER']}.said").write_text(f"{type(error).__name__}: {error}")
    dist.destroy_process_group()
