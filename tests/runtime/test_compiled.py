"""torch.compile with schedules that defer updates: one graph, no optimizer in it, and the same bits."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import laconic
from tests.processes import gloo_group, run_processes
from tests.runtime.replicas import data

WAYS = ("in place", "as another module", "in place, attached before", "another module, attached before", "blocks")
LATE = ("in place, after some steps", "blocks, after some steps")
STEPS, LATE_STEP = 8, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(x).tanh())


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def train(schedule: str, way: str) -> dict[str, object]:
    """Parameters after some steps, and the sizes of compiled graphs."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward

    def compile_blocks() -> None:
        for block in model.blocks:
            block.compile(backend=backend)

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    forward: nn.Module = model
    if way == "in place":
        model.compile(backend=backend)
    if way == "as another module":
        forward = torch.compile(model, backend=backend)
    rank = dist.get_rank()
    session = laconic.attach(forward, optimizer, f"bsp / all_reduce / none / {schedule}", timeout_s=20)
    if way == "in place, attached before":
        model.compile(backend=backend)
    if way == "another module, attached before":
        forward = torch.compile(model, backend=backend)
    if way == "blocks":
        compile_blocks()
    for step in range(STEPS):
        if step == LATE_STEP and way == "in place, after some steps":
            model.compile(backend=backend)
        if step == LATE_STEP and way == "blocks, after some steps":
            compile_blocks()
        forward(data(step, rank, 4, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if forward is not model:
        session.settle()
    average = copy.deepcopy(model)  # updates what was deferred, if it is the model that is attached
    found = len(graphs)
    session.settle()
    assert all(map(torch.equal, average.parameters(), model.parameters())), way
    session.detach()
    return {"parameters": [p.detach() for p in model.parameters()], "graphs": graphs[:found]}


def trained(ways: list[str], schedules: list[str]) -> dict[str, dict[str, object]]:
    """As one rank."""
    with gloo_group():
        return {f"{schedule}, {way}": train(schedule, way) for schedule in schedules for way in ways}


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_updates_are_made_outside_of_compiled_graphs() -> None:
    ways = ["not compiled", *WAYS, *LATE]
    schedules = ["priority", "dear", "wfbp"]
    ranks = run_processes(
        "tests.runtime.test_compiled:trained",
        world_size=2,
        arguments={"ways": ways, "schedules": schedules},
        timeout_s=150,
    )
    for rank in ranks:
        for schedule in schedules:
            plain = rank.value[f"{schedule}, not compiled"]["parameters"]
            for way in (*WAYS, *LATE):
                found = rank.value[f"{schedule}, {way}"]
                assert all(map(torch.equal, found["parameters"], plain)), (schedule, way)
                graphs = rank.value[f"wfbp, {way}"]["graphs"]
                if way in WAYS:
                    assert found["graphs"] == graphs, (schedule, way)
                else:  # one pass more, which begins with updates
                    assert found["graphs"][-1] == graphs[-1], (schedule, way)
                    assert len(found["graphs"]) <= 3 * len(graphs), (schedule, way)
    whole = rank.value["priority, in place"]["graphs"]
    assert max(whole) == 40, "all operations of the ten blocks"
