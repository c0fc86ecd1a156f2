"""What real processes do in the multi-process tests: called by run_processes on every rank."""

from __future__ import annotations

import copy
import itertools
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.errors import AttachError, CommunicationError, LaconicError
from laconic.experiments.small_gpt import GptShape, SmallGpt
from tests.processes import gloo_group
from tests.runtime.replicas import Loss, data, mlp, mlp_loss, sgd, snapshot


def _mlp() -> nn.Module:
    # About 3 MB, so that several buckets are formed.
    return nn.Sequential(
        nn.Linear(64, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 800),
        nn.ReLU(),
        nn.Linear(800, 10),
    )


def _gpt() -> nn.Module:
    return SmallGpt(GptShape(layers=2, width=128, heads=4, context=16))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(800, 400),
        nn.BatchNorm1d(400),
        nn.Linear(400, 10),
    )


def _gpt_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    tokens = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(100 * step + rank))
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


MODELS: dict[str, tuple] = {
    "mlp": (_mlp, lambda model, step, rank: model(data(step, rank, 8, 64)).square().mean()),
    "gpt": (_gpt, _gpt_loss),
    "cnn": (_cnn, lambda model, step, rank: model(data(step, rank, 8, 1, 12, 12)).square().mean()),
}


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def _everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters, buffers and optimizer state."""
    state = {f"model.{name}": value.clone() for name, value in model.state_dict().items()}
    for index, values in optimizer.state_dict()["state"].items():
        state |= {f"optimizer.{index}.{name}": value.clone() for name, value in values.items()}
    return state


def _train(model: nn.Module, forward: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, steps: int) -> None:
    for step in range(steps):
        loss(forward, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()


def equal_to_ddp(strategy: str, steps: int) -> dict[str, dict]:
    """Train each model with torch DDP and with laconic; everything there is at the end of both."""
    with gloo_group():
        return {name: _both_ways(make, loss, strategy, steps) for name, (make, loss) in MODELS.items()}


def _both_ways(make, loss: Loss, strategy: str, steps: int) -> dict:
    torch.manual_seed(dist.get_rank())  # ranks start from different weights
    original = make()
    theirs = copy.deepcopy(original)
    optimizer = _optimizer(theirs)
    _train(theirs, DistributedDataParallel(theirs), optimizer, loss, steps)
    expected = _everything(theirs, optimizer)

    ours = copy.deepcopy(original)
    optimizer = _optimizer(ours)
    session = laconic.attach(ours, optimizer, strategy, timeout_s=30)
    _train(ours, ours, optimizer, loss, steps)
    found = _everything(ours, optimizer)
    num_buckets = len(session.plan.buckets)
    counted = session.traffic.sent_bytes("payload")
    predicted = session.predicted_bytes_per_step() * steps
    session.detach()
    return {
        "ddp": expected,
        "laconic": found,
        "after_detach": _everything(ours, optimizer),
        "numbers": {"buckets": num_buckets, "counted": counted, "predicted": predicted},
    }


def wrapped_in_ddp(strategy: str, steps: int) -> dict[str, object]:
    """Attach to a model already wrapped in DDP, detach, train on, attach again."""
    make, loss = MODELS["mlp"]
    with gloo_group():
        torch.manual_seed(0)
        original = make()
        plain = copy.deepcopy(original)
        optimizer = _optimizer(plain)
        _train(plain, DistributedDataParallel(plain), optimizer, loss, steps)
        expected = snapshot(plain)

        model = copy.deepcopy(original)
        ddp = DistributedDataParallel(model)
        optimizer = _optimizer(model)
        with laconic.attach(ddp, optimizer, strategy, timeout_s=30) as session:
            _train(model, ddp, optimizer, loss, steps)
            found = snapshot(model)
            counted, predicted = session.traffic.sent_bytes("payload"), session.predicted_bytes_per_step() * steps
            saved = session.state_dict()
            try:
                laconic.attach(ddp, _optimizer(model), strategy)
            except AttachError as exc:
                twice = str(exc)
        sent = session.traffic.sent_bytes()
        _train(model, ddp, optimizer, loss, 2)
        assert session.traffic.sent_bytes() == sent, "a detached session still communicates"
        with laconic.attach(ddp, optimizer, strategy, timeout_s=30) as session:
            model.load_state_dict(found)
            session.load_state_dict(saved)
            assert session.step == steps
            _train(model, ddp, optimizer, loss, 2)
        return {
            "ddp": expected,
            "laconic": found,
            "counted": counted,
            "predicted": predicted,
            "twice": twice,
            "end": snapshot(model),
            "state": sorted(saved["ranks"][str(dist.get_rank())]),
        }


def accumulates_under_ddp() -> dict[str, object]:
    """session.accumulate() on a model wrapped in DDP, and a setting that DDP owns."""
    with gloo_group():
        ddp = DistributedDataParallel(mlp())
        optimizer = sgd(ddp)
        with laconic.attach(ddp, optimizer, "bsp", timeout_s=20) as session:
            predicted = session.predicted_bytes_per_step()
            alone = session.accumulate()
            for _ in range(2):
                with alone:
                    (mlp_loss(ddp, 0, dist.get_rank()) / 4).backward()
            inside = session.traffic.sent_bytes("payload")
            (mlp_loss(ddp, 1, dist.get_rank()) / 2).backward()
            optimizer.step()
            outside = session.traffic.sent_bytes("payload")
        try:
            laconic.attach(ddp, optimizer, "bsp", find_unused_parameters=True)
        except AttachError as exc:
            refusal = str(exc)
        return {
            "inside": inside,
            "outside": outside,
            "predicted": predicted,
            "refusal": refusal,
            "state": snapshot(ddp.module),
        }


def refuses_other_schedules() -> list[str]:
    """Errors of attaching a strategy that DDP's own scheduling would silently overrule."""
    with gloo_group():
        ddp = DistributedDataParallel(mlp())
        messages = []
        for strategy in ("bsp / all_reduce / none / wfbp", "bsp / all_reduce / none / fusion(1MiB)"):
            try:
                laconic.attach(ddp, sgd(ddp), strategy)
            except AttachError as exc:
                messages.append(str(exc))
        return messages


def stops_when_a_rank_is_lost(victim: int, how: str) -> dict[str, object]:
    """Train for ever; rank `victim` is killed from outside, raises, stalls or leaves early."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    model = mlp()
    optimizer = sgd(model)
    began_s = time.monotonic()
    try:
        with laconic.attach(model, optimizer, "bsp / all_reduce / none / wfbp", timeout_s=4) as session:
            for step in itertools.count():
                if rank == victim and step == 5:
                    print("ready", flush=True)
                    began_s = time.monotonic()
                    if how == "raise":
                        raise ValueError("the data loader broke")
                    if how in ("kill", "stop"):
                        time.sleep(60)
                    if how == "stall":
                        time.sleep(8)
                    if how == "leave":
                        session.detach()
                        return {"error": "", "seconds": 0.0}
                began_s = time.monotonic()
                mlp_loss(model, step, rank).backward()
                optimizer.step()
                optimizer.zero_grad()
    except (LaconicError, ValueError) as exc:
        print(f"stopped: {exc}", file=sys.stderr, flush=True)
        return {"error": f"{type(exc).__name__}: {exc}", "seconds": time.monotonic() - began_s}
    raise AssertionError("unreachable")


def leaves_out_a_step(strategies: list[str], steps: int) -> dict[str, dict[str, object]]:
    """Rank 1 leaves out its fourth step; how far each rank comes, and what it is told."""
    found: dict[str, dict[str, object]] = {}
    with gloo_group():
        rank = dist.get_rank()
        for strategy in strategies:
            model = mlp()
            optimizer = sgd(model, strategy)
            made, error = 0, ""
            try:
                with laconic.attach(model, optimizer, strategy, timeout_s=30, total_steps=1000):
                    for step in range(steps):
                        mlp_loss(model, step, rank).backward()
                        if rank != 1 or step != 3:
                            optimizer.step()
                        optimizer.zero_grad()
                        made = step + 1
                        time.sleep(0.002)
            except CommunicationError as exc:
                error = str(exc)
            found[strategy] = {"made": made, "error": error}
            dist.barrier()
    return found


def one_rank_never_attaches() -> str:
    """Rank 1 does not call attach; what the others are told."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if dist.get_rank() == 1:
        time.sleep(6)
        return ""
    model = mlp()
    try:
        laconic.attach(model, sgd(model), "bsp", timeout_s=3)
    except CommunicationError as exc:
        if dist.get_rank() == 0:
            time.sleep(1)  # it keeps the store, where the others look up who is missing
        return str(exc)
    raise AssertionError("attach returned although rank 1 never came")


def ranks_disagree() -> list[str]:
    """Ranks that attach different strategies, then different models."""
    messages = []
    with gloo_group():
        rank = dist.get_rank()
        for attempt in range(2):
            model = mlp() if attempt == 0 or rank == 0 else nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
            strategy = "ddp" if attempt == 1 or rank == 0 else "ddp-fp16"
            try:
                laconic.attach(model, sgd(model), strategy, timeout_s=10)
            except AttachError as exc:
                messages.append(str(exc))
    return messages


def one_rank_cannot_attach(victim: int) -> dict[str, object]:
    """Rank `victim` is refused, before and after the others have come, and then all of them attach."""
    with gloo_group():
        rank = dist.get_rank()
        rest = [other for other in range(dist.get_world_size()) if other != victim]
        group = dist.new_group([victim, rest[0]])
        found: dict[str, object] = {}
        for name, whole, early in (("early", True, True), ("late", True, False), ("group", False, False)):
            model = mlp()
            said, began_s = "", time.monotonic()
            if (rank == victim) is not early:
                time.sleep(1)
            if whole or rank in (victim, rest[0]):
                try:
                    strategy = "bps" if rank == victim else "bsp"
                    laconic.attach(model, sgd(model), strategy, process_group=None if whole else group, timeout_s=60)
                except LaconicError as exc:
                    said = f"{type(exc).__name__}: {exc}"
            found[name] = [said, time.monotonic() - began_s]
            dist.barrier()
        torch.manual_seed(rank)
        model = mlp()
        optimizer = sgd(model)
        with laconic.attach(model, optimizer, "bsp", timeout_s=20):
            mlp_loss(model, 0, rank).backward()
            optimizer.step()
        return {**found, "state": snapshot(model)}


def in_two_halves() -> dict[str, object]:
    """Four ranks, two process groups of two: each half trains for itself; attached twice in turn."""
    with gloo_group():
        rank = dist.get_rank()
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        torch.manual_seed(rank)
        model = nn.Linear(5, 3)
        optimizer = sgd(model)
        sizes = []
        for _ in range(2):
            with laconic.attach(model, optimizer, "bsp", process_group=halves[rank // 2], timeout_s=20) as session:
                sizes.append([session.rank, session.world_size])
                for step in range(3):
                    mlp_loss(model, step, rank).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        dist.barrier()  # rank 0, which hosts the store, must not end while the other half trains
        return {"state": snapshot(model), "sizes": sizes}


def user_collectives_do_not_mix() -> dict[str, torch.Tensor]:
    """The script's own collectives on the default group, between and after backward passes."""
    with gloo_group():
        model = mlp()
        optimizer = sgd(model)
        with laconic.attach(model, optimizer, "bsp / all_reduce / none / wfbp", timeout_s=20):
            for step in range(5):
                loss = mlp_loss(model, step, dist.get_rank())
                pending = dist.all_reduce(torch.ones(1000), async_op=True)
                loss.backward()
                total = loss.detach().clone()
                dist.all_reduce(total)
                pending.wait()
                optimizer.step()
                optimizer.zero_grad()
        return snapshot(model)


def distributed_checkpoint(folder: str) -> dict[str, object]:
    """Save with torch.distributed.checkpoint, load into fresh objects, continue both ways."""
    strategy = "bsp / all_reduce / bf16 + error_feedback / wfbp"
    with gloo_group():
        rank = dist.get_rank()

        def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
            for step in range(first, first + 3):
                mlp_loss(model, step, rank).backward()
                optimizer.step()
                optimizer.zero_grad()

        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with laconic.attach(model, optimizer, strategy, timeout_s=20) as session:
            steps(model, optimizer, 0)
            dcp.save({"model": model.state_dict(), "laconic": session.state_dict()}, checkpoint_id=folder)
            steps(model, optimizer, 3)
            uninterrupted = snapshot(model)
        fresh = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        optimizer = torch.optim.SGD(fresh.parameters(), lr=0.1)
        with laconic.attach(fresh, optimizer, strategy, timeout_s=20) as session:
            state = {"model": fresh.state_dict(), "laconic": session.state_dict()}
            dcp.load(state, checkpoint_id=folder)
            fresh.load_state_dict(state["model"])
            session.load_state_dict(state["laconic"])
            step = session.step
            steps(fresh, optimizer, 3)
        return {"uninterrupted": uninterrupted, "resumed": snapshot(fresh), "step": step}


def ends_without_detaching() -> None:
    """A script that forgets to detach must still end."""
    dist.init_process_group("gloo")
    model = mlp()
    optimizer = sgd(model)
    laconic.attach(model, optimizer, "bsp", timeout_s=20)
    mlp_loss(model, 0, dist.get_rank()).backward()
    optimizer.step()


def equal_to_ddp_over_nccl(strategy: str, steps: int) -> dict[str, object]:
    """As equal_to_ddp, but on one GPU that all ranks share, over NCCL."""
    rank = os.environ["RANK"]
    # Different host ids make NCCL take ranks on one GPU for ranks on different hosts.
    os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    make = MODELS["gpt"][0]
    torch.manual_seed(int(rank))
    original = make().cuda()
    states, memory_mib = {}, {}

    def on_gpu(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        with torch.device("cuda"):
            tokens = torch.randint(256, (4, 17), generator=torch.Generator("cuda").manual_seed(100 * step + rank))
        logits = model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    counted = predicted = 0
    for kind in ("warm-up", "ddp", "laconic"):
        model = copy.deepcopy(original)
        optimizer = _optimizer(model)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if kind != "laconic":
            _train(model, DistributedDataParallel(model, device_ids=[0]), optimizer, on_gpu, steps)
        else:
            with laconic.attach(model, optimizer, strategy, timeout_s=60) as session:
                _train(model, model, optimizer, on_gpu, steps)
                counted = session.traffic.sent_bytes("payload")
                predicted = session.predicted_bytes_per_step() * steps
        torch.cuda.synchronize()
        memory_mib[kind] = (torch.cuda.max_memory_allocated() - before) / 2**20
        states[kind] = {name: value.cpu() for name, value in _everything(model, optimizer).items()}
        del model, optimizer
    dist.destroy_process_group()
    return {"states": states, "memory_mib": memory_mib, "counted": counted, "predicted": predicted}


def replicas_that_differ(strategies: list[str], steps: int) -> dict[str, dict[str, object]]:
    """Local updates and gossip over real links: save while rounds are on their way, go on, resume, average."""
    with gloo_group():
        return {strategy: _saved_in_the_middle(strategy, steps) for strategy in strategies}


def _saved_in_the_middle(strategy: str, steps: int) -> dict[str, object]:
    make, loss = MODELS["mlp"]
    rank = dist.get_rank()

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
        for step in range(first, first + steps):
            loss(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    original = make()
    model = copy.deepcopy(original)
    optimizer = _optimizer(model)
    with laconic.attach(model, optimizer, strategy, timeout_s=30) as session:
        train(model, optimizer, 0)
        saved = copy.deepcopy([session.state_dict(), model.state_dict(), optimizer.state_dict()])
        train(model, optimizer, steps)
        uninterrupted = snapshot(model)
        session.wait()
        counted = session.traffic.sent_bytes("payload")
        predicted = session.predicted_bytes_per_step() * 2 * steps
        apart = session.consensus_distance()
        session.average()
        averaged = snapshot(model)
    model = copy.deepcopy(original)
    optimizer = _optimizer(model)
    with laconic.attach(model, optimizer, strategy, timeout_s=30) as session:
        for part, state in zip((optimizer, model, session), reversed(saved), strict=True):
            part.load_state_dict(state)
        train(model, optimizer, steps)
        resumed = snapshot(model)
    return {
        "uninterrupted": uninterrupted,
        "resumed": resumed,
        "averaged": averaged,
        "apart": apart,
        "bytes": [counted, predicted],
    }


def uneven_like_torch_join(batches: list[int]) -> dict[str, tuple[dict, dict]]:
    """Different numbers of batches under torch's Join around DDP, and under session.join(): both models."""
    with gloo_group():
        return {
            f"{name}, {kind.__name__}": _both_join(name, kind, batches[dist.get_rank()])
            for name in ("mlp", "cnn")
            for kind in (torch.optim.SGD, torch.optim.AdamW)
        }


def _both_join(name: str, kind: type[torch.optim.Optimizer], batches: int) -> tuple[dict, dict]:
    make, loss = MODELS[name]
    torch.manual_seed(dist.get_rank())
    original = make()
    theirs, ours = copy.deepcopy(original), copy.deepcopy(original)
    ddp = DistributedDataParallel(theirs)
    optimizer = kind(theirs.parameters(), lr=0.01)
    with Join([ddp]):
        _train(theirs, ddp, optimizer, loss, batches)
    optimizer = kind(ours.parameters(), lr=0.01)
    with laconic.attach(ours, optimizer, "ddp", timeout_s=30) as session, session.join():
        _train(ours, ours, optimizer, loss, batches)
    return snapshot(theirs), snapshot(ours)


def uneven_then_average(strategies: list[str]) -> dict[str, tuple[str, float]]:
    """9 steps on rank 0, 7 on rank 1, then average(): the error of each strategy and how long it took."""
    found: dict[str, tuple[str, float]] = {}
    with gloo_group():
        for strategy in strategies:
            model = mlp()
            optimizer = sgd(model)
            began_s, error = time.monotonic(), ""
            try:
                with laconic.attach(model, optimizer, strategy, timeout_s=15) as session:
                    _train(model, model, optimizer, mlp_loss, 7 if dist.get_rank() else 9)
                    session.average()
            except CommunicationError as exc:
                error = str(exc)
            found[strategy] = (error, time.monotonic() - began_s)
            dist.barrier()
    return found
