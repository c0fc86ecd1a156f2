"""What real processes do in the tests of servers: called by run_processes on every rank."""

from __future__ import annotations

import copy
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import laconic
from laconic.core.frames import Frame, new_token, send_frame
from laconic.errors import LaconicError
from laconic.runtime.servers import server_pool
from laconic.runtime.servers.child_process import ThreadServer
from tests.processes import gloo_group
from tests.runtime.replicas import data, mlp, mlp_loss, sgd, snapshot


@contextmanager
def servers_in_threads() -> Iterator[None]:
    """Servers in threads of their rank: a child process loads torch first, which takes seconds."""
    usual, server_pool.ProcessServer = server_pool.ProcessServer, ThreadServer  # type: ignore[misc]
    try:
        yield
    finally:
        server_pool.ProcessServer = usual  # type: ignore[misc]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 300), nn.Tanh(), nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 4))


def _loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = data(step, rank, 8, 16)
    return (model(x) - x[:, :4]).square().mean()


def _train(strategy: str, steps: int, original: nn.Module) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(original)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    with laconic.attach(model, optimizer, strategy, timeout_s=20):
        for step in range(steps):
            _loss(model, step, dist.get_rank()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return snapshot(model)


def equal_to_all_reduce(compressions: list[str]) -> dict[str, dict]:
    """bsp with servers and with all-reduce, compressor by compressor."""
    with gloo_group(), servers_in_threads():
        original = _model()
        return {
            compression: {
                architecture: _train(f"bsp / {architecture} / {compression}", 6, original)
                for architecture in ("all_reduce", "parameter_server")
            }
            for compression in compressions
        }


def losses(strategies: list[str], steps: int) -> dict[str, dict]:
    """The loss before and after training, on data of all ranks, and what came of replicas."""
    found: dict[str, dict] = {}
    with gloo_group(), servers_in_threads():
        _train("bsp", 1, _model())  # what autograd and a first attach start stays, and is not ours
        for strategy in strategies:
            model = _model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
            began = at_peace()
            with laconic.attach(model, optimizer, strategy, timeout_s=20) as session:
                before = _loss(model, 10_000, 0).item()
                for step in range(steps):
                    _loss(model, step, dist.get_rank()).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                session.average()
                after = _loss(model, 10_000, 0).item()
                met = snapshot(model)
            ended = at_peace()
            left = [sorted(ended[0] - began[0]), max(0, len(ended[1]) - len(began[1]))]
            found[strategy] = {"before": before, "after": after, "model": met, "left": left}
    return found


def beside_a_slow_one(strategy: str, steps: int, pause_s: float) -> dict[str, object]:
    """Train while rank 1 pauses before each of its steps; the time of this rank's steps, before ranks meet again."""
    with gloo_group(), servers_in_threads():
        rank, model = dist.get_rank(), _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        with laconic.attach(model, optimizer, strategy, timeout_s=30) as session:
            dist.barrier()
            began_s = time.monotonic()
            for step in range(steps):
                if rank == 1:
                    time.sleep(pause_s)
                _loss(model, step, rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            took_s = time.monotonic() - began_s
            session.average()
            met = snapshot(model)
        return {"seconds": took_s, "dropped": session.dropped, "model": met}


def after_a_long_pause(strategy: str, steps: int, pause_s: float) -> dict[str, object]:
    """Train for the same number of steps, with one long pause of rank 1; ranks then meet in a barrier of torch."""
    with gloo_group(), servers_in_threads():
        rank, model = dist.get_rank(), _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        began = at_peace()[0]
        with laconic.attach(model, optimizer, strategy, timeout_s=60) as session:
            for step in range(steps):
                if rank == 1 and step == 2:
                    time.sleep(pause_s)
                _loss(model, step, rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            began_s = time.monotonic()
            dist.barrier()
            waited_s = time.monotonic() - began_s
            session.average()
            met = snapshot(model)
        left = sorted(name for name in at_peace()[0] - began if name.startswith("laconic"))
        return {"seconds": waited_s, "dropped": session.dropped, "model": met, "left": left}


def holdings() -> tuple[set[str], list[str], list[int]]:
    """Names of threads, descriptors and child processes of this process; connections to the job's store left out."""
    threads = {thread.name for thread in threading.enumerate()}
    children = [
        int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and _parent_of(path) == os.getpid()
    ]
    store = _sockets_of_store()
    return threads, sorted(name for name in _open_files() if name not in store), children


def _open_files() -> list[str]:
    found: list[str] = []
    for path in Path("/proc/self/fd").iterdir():
        # Another thread may close one between the listing and the reading of it.
        with suppress(FileNotFoundError):
            found.append(str(path.readlink()))
    return found


def _sockets_of_store() -> set[str]:
    port = f":{int(os.environ['MASTER_PORT']):04X}"
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if port in (fields[1][-5:], fields[2][-5:]):
                found.add(f"socket:[{fields[9]}]")
    return found


def at_peace() -> tuple[set[str], list[str], list[int]]:
    """Holdings when all ranks are here and none is about to go."""
    dist.barrier()
    time.sleep(0.3)
    found = holdings()
    dist.barrier()
    return found


def _parent_of(path: Path) -> int:
    try:
        return int((path / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return -1


def with_child_processes() -> dict[str, object]:
    """asp with a server beside rank 0: train, save, train on, detach, and nothing is left."""
    with gloo_group():
        rank = dist.get_rank()
        model = mlp()
        optimizer = torch.optim.AdamW(
            [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.002}], lr=0.01
        )
        with laconic.attach(model, optimizer, "bsp", timeout_s=30):
            mlp_loss(model, 0, rank).backward()  # what autograd and a first attach start stays, and is not ours
        optimizer.zero_grad()
        before = at_peace()
        with laconic.attach(model, optimizer, "asp / parameter_server(shards=1)", timeout_s=30) as session:
            for step in range(5):
                mlp_loss(model, step, rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            saved, values = copy.deepcopy(session.state_dict()), snapshot(model)
            during = holdings()
            for step in range(5, 8):
                mlp_loss(model, step, rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            model.load_state_dict(values)
            session.load_state_dict(saved)
            again, loaded = copy.deepcopy(session.state_dict()), snapshot(model)
        after = at_peace()
        return {
            "children": [len(before[2]), len(during[2]), len(after[2])],
            "threads left": sorted(after[0] - before[0]),
            "descriptors": [before[1], after[1]],
            "saved": saved["ranks"][str(rank)],
            "again": again["ranks"][str(rank)],
            "values": values,
            "loaded": loaded,
        }


_addresses: list[tuple[str, int]] = []
"""Where the servers of this job listen, as the client was told."""


@contextmanager
def _addresses_noted() -> Iterator[None]:
    usual = server_pool.Client

    class Noting(usual):  # type: ignore[misc, valid-type]
        def __init__(self, addresses, *args, **options) -> None:
            _addresses[:] = addresses
            super().__init__(addresses, *args, **options)

    server_pool.Client = Noting  # type: ignore[misc]
    try:
        yield
    finally:
        server_pool.Client = usual  # type: ignore[misc]


def outsiders(strategy: str) -> dict[str, object]:
    """Half-open connections, garbage, wrong tokens and a worker that hangs while all ranks train on."""
    with gloo_group(), _addresses_noted():
        rank = dist.get_rank()
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        held: list[socket.socket] = []
        began_s = time.monotonic()
        with laconic.attach(model, optimizer, strategy, timeout_s=20) as session:
            for step in range(20):
                if rank == 1:
                    _disturb(step, held)
                    if step == 10:
                        time.sleep(2)
                mlp_loss(model, step, rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            session.average()
        for sock in held:
            sock.close()
        return {"model": snapshot(model), "seconds": time.monotonic() - began_s}


def _disturb(step: int, held: list[socket.socket]) -> None:
    sock = socket.create_connection(_addresses[0], timeout=5)
    held.append(sock)
    if step % 4 == 1:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)
    elif step % 4 == 2:
        sock.sendall(b"LCNC")  # and no more
    elif step % 4 == 3:
        send_frame(sock, Frame(1, 0, 0, note="a job of somebody else"), new_token())


def stops(strategy: str, victim: int, how: str, timeout_s: float = 4.0, also: Sequence[int] = ()) -> dict[str, object]:
    """Train for ever; then a server or a rank is killed, or a rank, and those in `also`, stalls or raises."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = mlp()
    optimizer = sgd(model)
    began_s = time.monotonic()
    before = None
    try:
        with laconic.attach(model, optimizer, strategy, timeout_s=timeout_s):
            if rank == victim:
                print("children", *holdings()[2], flush=True)
            for step in itertools.count():
                if (rank == victim or rank in also) and step == 5:
                    _strike(how)
                began_s = time.monotonic()
                before = snapshot(model)
                mlp_loss(model, step, rank).backward()
                optimizer.step()
                optimizer.zero_grad()
    except (LaconicError, ValueError) as exc:
        error, seconds = f"{type(exc).__name__}: {exc}", time.monotonic() - began_s
        if rank == 0:
            time.sleep(2.5)  # it keeps the store, where the others look up why a rank has ended
        deadline_s = time.monotonic() + 10
        while holdings()[2] and time.monotonic() < deadline_s:
            time.sleep(0.05)
        now = snapshot(model)
        unharmed = before is not None and all(torch.equal(before[name], value) for name, value in now.items())
        return {"error": error, "seconds": seconds, "children": len(holdings()[2]), "unharmed": unharmed}
    raise AssertionError("unreachable")


def _strike(how: str) -> None:
    if how == "kill server":
        os.kill(holdings()[2][0], 9)
    elif how == "raise":
        raise ValueError("the data loader broke")
    else:
        print("ready", flush=True)
        time.sleep(8 if how == "stall" else 60)


def against(strategy: str, steps: int) -> dict[str, object]:
    """Train with servers that run already, and without any."""
    with gloo_group():
        original = _model()
        return {"model": _train(strategy, steps, original), "usual": _train("bsp", steps, original)}


def turned_away(strategy: str) -> str:
    """What attaching says with another token than the server's."""
    with gloo_group():
        model = mlp()
        try:
            laconic.attach(model, sgd(model), strategy, timeout_s=10)
        except LaconicError as exc:
            return str(exc)
    raise AssertionError("the server took another job's token")


def undisturbed(strategy: str) -> dict[str, object]:
    """As `outsiders`, without them."""
    with gloo_group():
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with laconic.attach(model, optimizer, strategy, timeout_s=20):
            for step in range(20):
                mlp_loss(model, step, dist.get_rank()).backward()
                optimizer.step()
                optimizer.zero_grad()
        return {"model": snapshot(model)}


def with_outer_servers() -> dict[str, object]:
    """Local steps, and outer steps by servers in child processes."""
    steps, period = 60, 4
    with gloo_group():
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        before = float(_loss(model, 10_000, 0))
        with laconic.attach(model, optimizer, f"async_diloco(period={period})", timeout_s=60) as session:
            for step in range(steps):
                _loss(model, step, dist.get_rank()).backward()
                optimizer.step()
                optimizer.zero_grad()
            sent = session.traffic.sent_bytes("payload")
            session.average()
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        return {
            "before": before,
            "after": float(_loss(model, 10_000, 0)),
            "sent": sent,
            "predicted": steps // period * nbytes,
            "model": snapshot(model),
        }
