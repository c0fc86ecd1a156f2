"""What real processes do in the tests of auto: called by run_processes on every rank."""

from __future__ import annotations

import logging
import time

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import laconic
from laconic.auto.controller import Controller
from laconic.auto.planning import Decision, Findings, Option
from laconic.errors import AttachError
from tests.processes import gloo_group
from tests.runtime.replicas import data, snapshot

DDP = "bsp / all_reduce / none / fusion"
TOPK = "bsp / all_reduce / topk(density=0.1) + error_feedback / fusion"
LOCAL = "local_sgd(period=4) / all_reduce / int8 + error_feedback / fusion"


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.BatchNorm1d(64), nn.Linear(64, 8))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, numbers: range) -> None:
    for step in numbers:
        time.sleep(0.02)  # as long as a larger model computes: steps that take nothing differ by much
        model(data(step, rank, 8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class Scripted:
    """A planner whose answers are written down; it keeps what it was asked."""

    def __init__(self, *decisions: Decision | str | None) -> None:
        self._decisions = list(decisions)
        self.asked: list[Findings] = []
        self.prepared = 0

    def prepare(self) -> None:
        self.prepared += 1

    def start(self, findings: Findings) -> Scripted:
        self.asked.append(findings)
        return self

    def decision(self) -> Decision | str | None:
        return self._decisions.pop(0) if len(self._decisions) > 1 else self._decisions[0]

    def stop(self) -> None:
        pass


def chosen(strategy: str, *, steps_ratio: float) -> Decision:
    """steps_ratio: 0 for one that gains whatever it takes."""
    return Decision(best=Option(strategy, 0.1, steps_ratio), reason="Because.", ddp_step_s=0.2)


def adopts_a_plan(strategy: str, keeps: bool) -> dict[str, object]:
    """Train under auto with a planner that says `strategy`, and by hand with the same changes at the same steps."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("laconic").addHandler(handler)
    logging.getLogger("laconic").setLevel(logging.INFO)
    with gloo_group():
        rank, steps, events = torch.distributed.get_rank(), 100, laconic.EventList()
        planner = Scripted(chosen(strategy, steps_ratio=0.0 if keeps else 1e6))
        model = _model()
        optimizer = _optimizer(model)
        with laconic.attach(model, optimizer, DDP, events=events) as session:
            Controller(session, planner, steps).begin()
            _steps(model, optimizer, rank, range(steps))
            ends = str(session.strategy)
        changes = [(event.step, event.data["strategy"]) for event in events.events if event.kind == "change"]
        told = [
            (event.step, event.data["strategy"], event.data["reason"])
            for event in events.events
            if event.kind == "auto"
        ]
        counted = [event.step for event in events.events if event.kind == "step"]
        by_hand = _model()
        other = _optimizer(by_hand)
        with laconic.attach(by_hand, other, DDP) as session:
            at = 0
            for step, following in [*changes, (steps, "")]:
                _steps(by_hand, other, rank, range(at, step))
                at = step
                if following:
                    session.change_strategy(following)
        found = planner.asked[0] if planner.asked else None
        return {
            "auto": snapshot(model),
            "by_hand": snapshot(by_hand),
            "changes": changes,
            "told": told,
            "counted": counted,
            "ends": ends,
            "lines": lines,
            "layers": [] if found is None else [layer.name for layer in found.workload.layers],
            "compute_s": 0.0 if found is None else found.workload.compute_s,
            "hosts": 0 if found is None else found.cluster.num_devices,
            "refused": _refused(),
        }


def _refused() -> list[str]:
    """What attach says to sharded models, and to models wrapped in DDP."""
    said: list[str] = []
    model = _model()
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    for one in (model, nn.parallel.DistributedDataParallel(_model())):
        try:
            laconic.attach(one, _optimizer(one), "auto")
        except AttachError as error:
            said.append(str(error))
    return said
