"""What real processes do in the tests of compressors: called by run_processes on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import laconic
from tests.processes import gloo_group
from tests.runtime.replicas import data, snapshot


def trains_with_powersgd() -> dict[str, object]:
    """A deep model, a bucket per parameter, two rounds each, all of them open at the same time."""
    with gloo_group():
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(24, 24), nn.Tanh())))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        strategy = "bsp / all_reduce / powersgd(rank=2) + error_feedback / wfbp"
        losses: list[float] = []
        counted = predicted = 0
        with laconic.attach(model, optimizer, strategy, timeout_s=20) as session:
            for step in range(40):
                loss = (model(data(step, dist.get_rank(), 16, 24)) - 0.3).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                if step == 0:
                    before = session.traffic.sent_bytes("payload")
            counted = session.traffic.sent_bytes("payload") - before
            predicted = 39 * session.predicted_bytes_per_step()
            num_buckets = len(session.plan.buckets)
        return {
            "state": snapshot(model),
            "losses": losses,
            "counted": counted,
            "predicted": predicted,
            "num_buckets": num_buckets,
        }
