"""Training scripts of elastic workers in which something happens on purpose."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from benchmarks.elastic.worker import BATCH, CLASSES, INPUTS, SEED, Samples, digest, make_model, train
from torch.utils.data import DataLoader

import laconic
from laconic.membership.transport import ViewTransport
from laconic.membership.view import View, ViewBroken
from laconic.runtime.elastic.connections import Connections
from laconic.runtime.elastic.recovery import ElasticRecovery
from laconic.runtime.elastic.vote import Vote
from laconic.runtime.engine import Task


def one_misses_the_vote(strategy: str, folder: str) -> None:
    """In the seventh unit the vote of one worker seems to fail, although it has completed on all others."""
    _misses_a_vote(6)
    train(strategy, folder, last_step=24)


def _misses_a_vote(unit: int) -> None:
    hear = ElasticRecovery._heard

    def missed(recovery: ElasticRecovery, vote: Vote) -> tuple[dict[str, int], bool]:
        before = recovery.raised
        heard = hear(recovery, vote)
        if recovery.unit == unit and recovery.view.number == 0 and recovery.transport.rank == 2:
            recovery.raised = before
            raise ViewBroken("the answer did not arrive")
        return heard

    ElasticRecovery._heard = missed


def one_is_slow(strategy: str, folder: str) -> None:
    """The worker in one slot takes three times as long for a sample as the others."""
    slow = os.environ["LOCAL_RANK"] == "1"
    train(strategy, folder, sample_s=0.006 if slow else 0.002, balance=True)


def one_raises(strategy: str, folder: str) -> None:
    """The script of one worker has a mistake, which shows after a while."""
    if os.environ["LOCAL_RANK"] == "1":
        made = ElasticRecovery.step_made

        def step_made(recovery: ElasticRecovery) -> None:
            made(recovery)
            if recovery.unit == 5:
                raise ZeroDivisionError("a mistake in the script")

        ElasticRecovery.step_made = step_made
    train(strategy, folder, last_step=200)


def two_die_in_the_vote(strategy: str, folder: str) -> None:
    """Two workers of the first view die when they have sent their part of a vote, before they know the outcome."""
    hear = ElasticRecovery._heard

    def fatal(recovery: ElasticRecovery, vote: Vote) -> tuple[dict[str, int], bool]:
        if recovery.unit == 5 and recovery.view.number == 0 and recovery.transport.rank in (1, 3):
            os.kill(os.getpid(), 9)
        return hear(recovery, vote)

    ElasticRecovery._heard = fatal
    train(strategy, folder, last_step=30)


def one_misses_a_connection(strategy: str, folder: str) -> None:
    """A worker dies; when its replacement joins, a connection breaks on a rank after the others have gone on."""
    connect, missed = Connections.connect, list[int]()

    def breaks(connections: Connections, view: View) -> None:
        connect(connections, view)
        if view.number and view.fresh and view.members.index(os.environ["LACONIC_WORKER"]) == 1 and not missed:
            missed.append(view.number)
            time.sleep(0.5)  # the others take their next batch
            raise ViewBroken("a connection broke")

    Connections.connect = breaks
    step_made = ElasticRecovery.step_made

    def fatal(recovery: ElasticRecovery) -> None:
        if recovery.unit == 5 and recovery.view.number == 0 and recovery.transport.rank == 3:
            os.kill(os.getpid(), 9)
        step_made(recovery)

    ElasticRecovery.step_made = fatal
    train(strategy, folder, sleep_s=0.05, last_step=120)


def joiners_die_with_half_the_state(strategy: str, folder: str) -> None:
    """The first worker that joins dies while it takes the state over; the source of the second one does."""
    import laconic.runtime.elastic.recovery as module

    share = module.share_state

    def fatal(transport: ViewTransport, *arguments: object) -> object:
        name, place = os.environ["LACONIC_WORKER"], Path(folder)
        if name == "0.4":
            os.kill(os.getpid(), 9)
        if transport.rank == 0 and (place / "0.5.jsonl").exists() and not (place / "source-died").exists():
            (place / "source-died").write_text(name)
            os.kill(os.getpid(), 9)
        return share(transport, *arguments)

    module.share_state = fatal
    train(strategy, folder)


def with_other_samples(strategy: str, folder: str) -> None:
    """One worker draws the order of samples from another seed."""
    model, optimizer = make_model()
    elastic = laconic.Elastic(min_ranks=1)
    loader = DataLoader(Samples(), batch_size=BATCH, shuffle=True)
    with laconic.attach(model, optimizer, strategy, elastic=elastic, timeout_s=60) as session:
        for inputs, targets in session.batches(loader, epochs=10**6, seed=int(os.environ["LOCAL_RANK"] == "2")):
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()


def rounds_by_time(strategy: str, folder: str) -> None:
    """Every step moves the only parameter by one, and the worker in one slot is slower than the others."""
    place = Path(folder)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    log = laconic.EventLog(place / f"{os.environ['LACONIC_WORKER']}.jsonl")
    elastic, period = laconic.Elastic(min_ranks=1), laconic.Strategy.parse(strategy).synchronization.interval
    with laconic.attach(model, optimizer, strategy, elastic=elastic, timeout_s=60, events=log) as session:
        while session.step < 8 * period:
            model(torch.ones(1, 1)).sum().backward()
            time.sleep(0.06 if os.environ["LOCAL_RANK"] == "1" else 0.02)
            optimizer.step()
            optimizer.zero_grad()
            if session.step % period == 0:
                data = {
                    "digest": repr(model.weight.item()),
                    "wall_s": time.time(),
                    "view": session.views[-1].view.number,
                }
                log.write(laconic.Event("digest", time.monotonic(), session.rank, session.step, 0.0, {**data}))
                if session.step == 3 * period and session.rank == 2:
                    os.kill(os.getpid(), 9)


def with_a_scheduler(strategy: str, folder: str, loop: str) -> None:
    """The loop changes carried objects after each step; two workers die and are replaced."""
    place = Path(folder)
    model, _ = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    steps = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), lambda step: step)
    log = laconic.EventLog(place / f"{os.environ['LACONIC_WORKER']}.jsonl")
    elastic = laconic.Elastic(min_ranks=1, max_ranks=8, carry=[scheduler, steps])
    samples = Samples()
    with laconic.attach(model, optimizer, strategy, elastic=elastic, timeout_s=60, events=log) as session:
        loader = DataLoader(samples, batch_size=BATCH, shuffle=True)
        own = ((samples.inputs[:8], samples.targets[:8]) for _ in range(10**6))
        for inputs, targets in own if loop == "own" else session.batches(loader, epochs=10**6, seed=SEED):
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            scheduler.step()
            steps.optimizer.step()
            steps.step()
            optimizer.zero_grad()
            assert scheduler.last_epoch == steps.last_epoch == session.step
            if loop == "measures":
                assert session.consensus_distance() == 0
            said = f"{digest(model.parameters())} {scheduler.get_last_lr()}"
            data = {"digest": said, "wall_s": time.time(), "view": session.views[-1].view.number}
            log.write(laconic.Event("digest", time.monotonic(), session.rank, session.step, 0.0, {**data}))
            if session.step == 6 and session.rank >= 2 and session.views[-1].view.number == 0:
                os.kill(os.getpid(), 9)
            time.sleep(0.02)
            last = session.views[-1]
            if last.view.number and session.world_size == 4 and session.step >= 10 + last.step:
                break


def scaled_loss_and_two_optimizers(strategy: str, folder: str) -> None:
    """Muon and AdamW under a GradScaler whose scale changes all the time; one worker dies and is replaced."""
    place = Path(folder)
    model, _ = make_model()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    optimizers = [
        torch.optim.Muon(matrices, lr=2e-3),
        torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], lr=2e-3),
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    loader = DataLoader(Samples(), batch_size=BATCH, shuffle=True)
    log = laconic.EventLog(place / f"{os.environ['LACONIC_WORKER']}.jsonl")
    elastic = laconic.Elastic(min_ranks=1, max_ranks=8)
    with laconic.attach(
        model, optimizers, strategy, elastic=elastic, timeout_s=60, events=log, grad_scaler=scaler
    ) as session:
        last = session.step  # a step that is skipped must not be told as the one before it
        for number, (inputs, targets) in enumerate(session.batches(loader, epochs=10**6, seed=SEED)):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            # Once in a while the mean gradient of all is not finite, so every rank skips the step.
            overflow = session.rank == 0 and number % 5 == 3
            scaler.scale(loss * (float("inf") if overflow else 1.0)).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
            if session.step > last:
                last = session.step
                states = [optimizer.state[p] for optimizer in optimizers for p in optimizer.state]
                fields = [value for state in states for _, value in sorted(state.items())]
                said = f"{digest([*model.parameters(), *map(torch.as_tensor, fields)])} {scaler.get_scale()}"
                data = {"digest": said, "wall_s": time.time(), "view": session.views[-1].view.number}
                log.write(laconic.Event("digest", time.monotonic(), session.rank, last, 0.0, {**data}))
                if last == 6 and session.rank == 2 and session.views[-1].view.number == 0:
                    os.kill(os.getpid(), 9)
            time.sleep(0.02)
            joined = any(change.view.number and change.view.fresh for change in session.views)
            if joined and last >= 12 + max(change.step for change in session.views):
                break


def branches_are_left_out_and_one_misses_the_vote(strategy: str, folder: str) -> None:
    """In a step in which nobody uses the rare branch."""
    _misses_a_vote(5)
    branches_are_left_out(strategy, folder, dies=False)


def branches_are_left_out_and_one_dies_in_the_vote(strategy: str, folder: str) -> None:
    """In a step in which nobody uses the rare branch; no other rank hears its vote."""
    vote = ElasticRecovery._vote

    def fatal(recovery: ElasticRecovery, what: str, tasks: Sequence[Task] = ()) -> Vote:
        if recovery.unit == 5 and recovery.view.number == 0 and recovery.transport.rank == 3:
            time.sleep(0.3)  # all others have prepared the step by then
            os.kill(os.getpid(), 9)
        return vote(recovery, what, tasks)

    ElasticRecovery._vote = fatal
    branches_are_left_out(strategy, folder, dies=False)


def branches_are_left_out(strategy: str, folder: str, dies: bool = True) -> None:
    """No rank uses one branch, one rank another, but not in every step; a worker dies before a forward pass."""
    place = Path(folder)
    model, _ = make_model()
    model.add_module("rare", torch.nn.Linear(INPUTS, CLASSES))
    model.add_module("never", torch.nn.Linear(INPUTS, CLASSES))
    trunk = torch.nn.Sequential(*[layer for name, layer in model.named_children() if name.isdigit()])
    rare, never = model.get_submodule("rare"), model.get_submodule("never")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    before = digest(never.parameters())
    loader = DataLoader(Samples(), batch_size=BATCH, shuffle=True)
    log = laconic.EventLog(place / f"{os.environ['LACONIC_WORKER']}.jsonl")
    elastic = laconic.Elastic(min_ranks=1, max_ranks=8)
    with laconic.attach(model, optimizer, strategy, elastic=elastic, timeout_s=60, events=log) as session:
        for number, (inputs, targets) in enumerate(session.batches(loader, epochs=10**6, seed=SEED)):
            if dies and number == 8 and session.rank == 2 and session.views[-1].view.number == 0:
                os.kill(os.getpid(), 9)
            uses_it = session.rank == 0 and session.step % 3 != 2
            outputs = trunk(inputs) + rare(inputs) if uses_it else trunk(inputs)
            torch.nn.functional.cross_entropy(outputs, targets).backward()
            assert all(parameter.grad is None for parameter in never.parameters())
            nobody_used_it = session.step % 3 == 2
            if not nobody_used_it or "error_feedback" not in strategy:  # which may still owe it something
                assert all((parameter.grad is None) == nobody_used_it for parameter in rare.parameters()), session.step
            optimizer.step()
            optimizer.zero_grad()
            said = digest([*model.parameters(), *(optimizer.state[p]["exp_avg"] for p in optimizer.state)])
            data = {"digest": said, "wall_s": time.time(), "view": session.views[-1].view.number}
            log.write(laconic.Event("digest", time.monotonic(), session.rank, session.step, 0.0, {**data}))
            time.sleep(0.02)
            if session.step >= 24:
                break
    assert digest(never.parameters()) == before, "weight decay must not touch what nobody used"


def loads_its_checkpoint(strategy: str, folder: str, what: str) -> None:
    """The script loads a checkpoint when it starts, also where it replaces a worker that has died; see `what`."""
    model, optimizer = make_model()
    loader = DataLoader(Samples(), batch_size=BATCH, shuffle=True)
    elastic = laconic.Elastic(min_ranks=1, max_ranks=8)
    log = laconic.EventLog(Path(folder) / f"{os.environ['LACONIC_WORKER']}.jsonl")
    with laconic.attach(model, optimizer, strategy, elastic=elastic, timeout_s=60, events=log) as session:
        parts = {"model": model, "optimizer": optimizer, "session": session}
        path = Path(folder) / f"checkpoint{session.rank}.pt"
        if path.exists() and (what in parts or session.step == 0):
            saved = torch.load(path)
            for name in [what] if what in parts else parts:
                parts[name].load_state_dict(saved[name])
        for inputs, targets in session.batches(loader, epochs=10**6, seed=SEED):
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            if session.step == 4:
                torch.save({name: part.state_dict() for name, part in parts.items()}, path)
            data = {"digest": digest(model.parameters()), "wall_s": time.time(), "view": session.views[-1].view.number}
            log.write(laconic.Event("digest", time.monotonic(), session.rank, session.step, 0.0, {**data}))
            if session.step == 6 and session.rank == 1 and session.views[-1].view.number == 0:
                os.kill(os.getpid(), 9)
            time.sleep(0.02)
            joined = [change.step for change in session.views if change.view.number and change.view.fresh]
            if joined and session.step >= 6 + joined[-1]:
                break
        assert session._recovery is not None
        parts["model"].load_state_dict(model.state_dict())  # all ranks may load, when they have worked together


def a_loop_over_epochs(strategy: str, folder: str) -> None:
    """The learning rate changes after every epoch; a worker dies in the third and is replaced."""
    model, _ = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = DataLoader(Samples(), batch_size=BATCH * 2, shuffle=True)  # 5 steps
    elastic = laconic.Elastic(min_ranks=1, max_ranks=8, carry=[scheduler])
    log = laconic.EventLog(Path(folder) / f"{os.environ['LACONIC_WORKER']}.jsonl")
    with laconic.attach(model, optimizer, strategy, elastic=elastic, timeout_s=60, events=log) as session:
        ends_at = 10**6
        for epoch in range(session.epoch, 10**6):
            for inputs, targets in session.batches(loader, epochs=epoch + 1, seed=SEED):
                torch.nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
                if epoch == 2 and session.rank == 2 and session.views[-1].view.number == 0:
                    os.kill(os.getpid(), 9)
                time.sleep(0.02)
            scheduler.step()
            assert scheduler.last_epoch == session.epoch == epoch + 1
            said = f"{digest(model.parameters())} {scheduler.get_last_lr()}"
            data = {"digest": said, "wall_s": time.time(), "view": session.views[-1].view.number}
            log.write(laconic.Event("digest", time.monotonic(), session.rank, session.step, 0.0, {**data}))
            if any(change.view.number and change.view.fresh for change in session.views):
                ends_at = min(ends_at, epoch + 2)
            if epoch >= ends_at:
                break


def twice_and_an_evaluation(strategy: str, folder: str) -> None:
    """The script does more after training; then it attaches once more."""
    train(strategy, folder, last_step=8)
    time.sleep(1.5)
    (Path(folder) / f"evaluated.{os.environ['LACONIC_WORKER']}").touch()
    while len([*Path(folder).glob("evaluated.*")]) < 4:
        time.sleep(0.1)  # the error of the first one ends all
    model, optimizer = make_model()
    laconic.attach(model, optimizer, strategy, elastic=laconic.Elastic(), timeout_s=60)
