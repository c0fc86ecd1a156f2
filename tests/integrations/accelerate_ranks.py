"""What each rank of the accelerate tests does; one process runs all of it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.utils.data import DataLoader

import laconic
from laconic.integrations.accelerate import prepare
from laconic.integrations.rank_state import rank_file
from tests.integrations.problem import BATCH, LOSSLESS, Model, Rows, said, snapshot

DILOCO = "diloco(period=3)"
COMPRESSED = "bsp / all_reduce / int4 + error_feedback / fusion"


class Run:
    """A model with its optimizer, scheduler and loader, prepared by accelerate alone or with laconic."""

    def __init__(self, strategy: str | None, *, accumulation: int = 1, **settings: Any) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, **settings)
        model: nn.Module = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
        self.session: laconic.Session | None = None
        if strategy is None:
            self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        else:
            self.model, self.optimizer, self.session = prepare(self.accelerator, model, optimizer, strategy)
        self.loader, self.scheduler = self.accelerator.prepare(DataLoader(Rows(96), batch_size=BATCH), scheduler)
        self.distances: list[float] = []
        self.sent: list[int] = []

    def train(self, begin: int, end: int) -> None:
        """Train with the batches from `begin` to `end`."""
        for index, batch in enumerate(self.loader):
            if not begin <= index < end:
                continue
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(**batch)["loss"])
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            if self.session is not None:
                self.distances.append(self.session.consensus_distance())
                self.sent.append(self.session.traffic.sent_bytes("payload"))

    def result(self) -> dict[str, torch.Tensor]:
        return snapshot(self.accelerator.unwrap_model(self.model))


def at_once(strategy: str | None, num_batches: int, **settings: Any) -> Run:
    run = Run(strategy, **settings)
    run.train(0, num_batches)
    if run.session is not None:
        run.session.detach()
    return run


def resumed(folder: str, strategy: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Trained at once with a checkpoint half-way, and continued from there by another run."""
    first = Run(strategy)
    assert first.session is not None
    with first.session:
        first.train(0, 4)
        first.accelerator.save_state(folder)
        first.train(4, 8)
    second = Run(strategy)
    assert second.session is not None
    with second.session:
        second.accelerator.load_state(folder)
        second.train(4, 8)
    return first.result(), second.result()


class Pair:
    """Two models of one accelerator, each with an optimizer and a session of its own, as in a GAN."""

    def __init__(self) -> None:
        self.accelerator = Accelerator(cpu=True)
        self.models: list[nn.Module] = [Model(0), Model(1)]
        self.optimizers: list[Any] = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in self.models]
        prepared = zip(self.models, self.optimizers, strict=True)
        made = [prepare(self.accelerator, model, optimizer, DILOCO) for model, optimizer in prepared]
        self.models, self.optimizers = [one[0] for one in made], [one[1] for one in made]
        self.sessions = [one[2] for one in made]
        self.loader = self.accelerator.prepare(DataLoader(Rows(96), batch_size=BATCH))

    def train(self, begin: int, end: int) -> None:
        for batch in list(self.loader)[begin:end]:
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                self.accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()

    def result(self) -> list[dict[str, torch.Tensor]]:
        return [snapshot(self.accelerator.unwrap_model(model)) for model in self.models]


def two_models(folder: str) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """As resumed(), for two models in the same checkpoint."""
    first, second = Pair(), Pair()
    first.train(0, 4)
    first.accelerator.save_state(folder)
    first.train(4, 8)
    second.accelerator.load_state(folder)
    second.train(4, 8)
    for session in (*first.sessions, *second.sessions):
        session.detach()
    return first.result(), second.result()


def refusals(folder: str) -> dict[str, str]:
    def message(make: Any) -> str:
        try:
            make()
        except Exception as error:  # noqa: BLE001 - the test reads it
            return said(error)
        return "nothing was refused"

    def wrapped() -> None:
        accelerator = Accelerator(cpu=True)
        model = Model()
        ddp, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        prepare(accelerator, ddp, optimizer, LOSSLESS)

    def handler() -> None:
        accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=5)])
        model = Model()
        prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1), LOSSLESS)

    def twice() -> None:
        accelerator = Accelerator(cpu=True)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, session = prepare(accelerator, model, optimizer, LOSSLESS)
        with session:
            prepare(accelerator, model, optimizer, LOSSLESS)

    def no_state() -> None:
        run = Run(DILOCO)
        assert run.session is not None
        with run.session:
            path = rank_file(Path(folder), run.session.rank)
            path.unlink()
            run.accelerator.load_state(folder)

    return {
        "wrapped": message(wrapped),
        "handler": message(handler),
        "twice": message(twice),
        "no state": message(no_state),
    }


def everything(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["ddp"] = at_once(None, 6).result()
    found["lossless"] = at_once(LOSSLESS, 6).result()

    found["auto"] = at_once("auto", 6).result()

    found["ddp accumulating"] = at_once(None, 9, accumulation=3).result()
    run = at_once(LOSSLESS, 9, accumulation=3)
    found["lossless accumulating"], found["sent"] = run.result(), run.sent
    found["no_sync is left"] = hasattr(run.model, "no_sync")

    run = Run(DILOCO)
    assert run.session is not None
    with run.session as session:
        run.train(0, 7)
        found["prepared again"] = run.accelerator.prepare(run.model) is run.model
        # A copy of the model is not attached, and neither is its no_sync().
        with copy.deepcopy(run.model).no_sync():
            session.average()
    found["diloco"], found["distances"] = run.result(), run.distances
    found["prepared after detach()"] = type(run.accelerator.prepare(run.model)).__name__

    for name, strategy in {"compressed": COMPRESSED, "diloco": DILOCO}.items():
        found[f"{name} at once"], found[f"{name} resumed"] = resumed(f"{folder}/{name}", strategy)
    found["two at once"], found["two resumed"] = two_models(f"{folder}/two")
    found["refusals"] = refusals(f"{folder}/diloco")
    return found
