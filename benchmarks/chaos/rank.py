"""What one rank of a job does, and what it says of how it ended."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import laconic
from benchmarks.chaos.scenario import LATE_S, STEPS, STRATEGIES, TIMEOUT_S, Scenario
from laconic.errors import LaconicError, PeerLost

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "SIGTERM": signal.SIGTERM, "frozen": signal.SIGSTOP}

SHOW_STACKS = signal.SIGUSR1
"""A rank that hangs answers it with the stacks of all its threads, in its log."""


class Rank:
    """One rank of the job a scenario describes; `strikes`: whether the fault comes at all."""

    def __init__(self, scenario: Scenario, rank: int, port: int, folder: Path, *, strikes: bool) -> None:
        self.scenario, self.rank, self.port, self.folder = scenario, rank, port, folder
        self._is_victim = strikes and rank == scenario.victim
        self._struck = False
        self._step = -1

    def run(self) -> int:
        """Train until the end or an error; writes rank<r>.json and gives the exit status."""
        ended: dict[str, object] = {"rank": self.rank}
        try:
            self._train()
            ended["outcome"] = "finished"
        except BaseException as exc:  # noqa: BLE001 - how it ended is what this is about
            ended |= {
                "outcome": "LaconicError" if isinstance(exc, LaconicError) else type(exc).__name__,
                "peer_lost": isinstance(exc, PeerLost),
                "words": str(exc),
                "trace": traceback.format_exc()[-3000:],
            }
        ended["at_s"] = time.monotonic()
        ended["threads"] = self._threads()
        self._write(f"rank{self.rank}.json", json.dumps(ended))
        return 0 if ended["outcome"] == "finished" else 1

    def _threads(self) -> list[str]:
        """Laconic's threads that are still there when everything should be over."""
        if self.scenario.style == "bare":
            return []  # it has not detached, and the process ends: the others are waiting for that
        fault = self.folder / "fault"
        deadline_s = float(fault.read_text()) + TIMEOUT_S + LATE_S if fault.exists() else 0.0
        deadline_s = max(deadline_s, time.monotonic() + 3.0)
        while True:
            names = [thread.name for thread in threading.enumerate() if thread.name.startswith("laconic")]
            if not names or time.monotonic() > deadline_s:
                return names
            time.sleep(0.05)

    def _write(self, name: str, text: str) -> None:
        part = self.folder / f"{name}.part"
        part.write_text(text, encoding="utf-8")
        part.rename(self.folder / name)

    def _moment(self, name: str) -> None:
        """The fault strikes here if it is due."""
        due = self._step == self.scenario.step or name in ("attach", "detach")
        if not self._is_victim or self._struck or name != self.scenario.moment or not due:
            return
        self._struck = True
        self._write("fault", str(time.monotonic()))
        if self.scenario.fault == "exception":
            raise ValueError("chaos")
        number = SIGNALS[self.scenario.fault]
        if self.scenario.delay_s:
            threading.Timer(self.scenario.delay_s, os.kill, (os.getpid(), number)).start()
        else:
            os.kill(os.getpid(), number)
            time.sleep(0.01)  # a signal to oneself is handled at the next chance

    def _train(self) -> None:
        scenario = self.scenario
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        store = dist.TCPStore(
            "127.0.0.1",
            self.port,
            is_master=scenario.store == "rank 0" and self.rank == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=30),
        )
        limit = timedelta(seconds=30)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=scenario.world_size, timeout=limit)
        model, optimizer = self._model()
        warnings.simplefilter("ignore")
        dist.barrier()
        time.sleep(0.3 * self._is_victim)  # nobody may still be in an operation of the script's own
        self._moment("attach")
        session = laconic.attach(model, optimizer, STRATEGIES[scenario.strategy], timeout_s=TIMEOUT_S)
        if scenario.style == "with":
            with session:
                self._loop(model, optimizer, session)
        elif scenario.style == "finally":
            try:
                self._loop(model, optimizer, session)
            finally:
                session.detach()
        else:
            with ExitStack() as stack:
                # A script that lets an error pass never detaches; then at least nothing may keep the process alive.
                self._loop(model, optimizer, session)
                stack.callback(session.detach)
        self._write(f"detached{self.rank}", "")
        torch.save([parameter.detach() for parameter in model.parameters()], self.folder / f"model{self.rank}.pt")

    def _model(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        middle = nn.BatchNorm1d(128) if self.scenario.batch_norm else nn.LayerNorm(128)
        first, last = (nn.Linear(64, 128), nn.ReLU()), (nn.ReLU(), nn.Linear(128, 128), nn.Linear(128, 10))
        model = nn.Sequential(*first, nn.Linear(128, 128), middle, *last)
        model[2].register_forward_pre_hook(lambda *_: self._moment("forward"))

        def passes(_: nn.Module, __: object, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda gradient: self._moment("backward"))

        model[2].register_forward_hook(passes)
        momentum = 0.0 if self.scenario.strategy == "demo" else 0.9
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)

    def _loop(self, model: nn.Module, optimizer: torch.optim.Optimizer, session: laconic.Session) -> None:
        generator = torch.Generator().manual_seed(self.rank)
        for self._step in range(STEPS):
            if self._step == STEPS - 1:
                self._write(f"last{self.rank}", "")
            inputs = torch.randn(8, 64, generator=generator)
            model(inputs).square().mean().backward()
            self._moment("before step")
            optimizer.step()
            self._moment("between")
            optimizer.zero_grad()
            if self._step == self.scenario.step:
                if self.scenario.moment == "state_dict":
                    self._moment("state_dict")
                    session.state_dict()
                elif self.scenario.moment == "average":
                    self._moment("average")
                    session.average()
        self._moment("detach")


def main(scenario: Scenario, rank: int, port: int, folder: Path, *, strikes: bool) -> None:
    """Run as a forked process; never returns."""
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(SHOW_STACKS, all_threads=True)
    status = Rank(scenario, rank, port, folder, strikes=strikes).run()
    sys.stdout.flush()
    sys.stderr.flush()
    # The interpreter's end waits for threads that are no daemons: so does this, and no more.
    threading._shutdown()  # type: ignore[attr-defined]
    os._exit(status)
