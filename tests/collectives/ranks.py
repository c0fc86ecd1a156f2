"""What the ranks of the Gloo tests do; started by tests.processes, one process per rank."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.collectives import ALGORITHMS
from laconic.collectives.execution import WholeExchange, run
from laconic.collectives.price import price
from laconic.core.torch_distributed import TorchTransport
from tests.processes import gloo_group
from tests.runtime.replicas import mlp, mlp_loss, sgd, snapshot


def sums(steps: int) -> dict[str, object]:
    """Every algorithm on every size, several in flight, over Gloo; then training beside DDP."""
    found: dict[str, object] = {}
    alone = str(os.environ.pop("LACONIC_HOST", ""))
    with gloo_group():
        rank, size = dist.get_rank(), dist.get_world_size()
        transport = TorchTransport(timeout_s=20)
        found["one host"] = transport.hosts
        dist.barrier()  # another rank may still be connecting to this one
        transport.close()
        os.environ["LACONIC_HOST"] = f"{alone}{rank // 2}"
        transport = TorchTransport(timeout_s=20)
        found["hosts"] = transport.hosts
        for name, make in ALGORITHMS.items():
            collective = make(transport.hosts)
            for numel in (0, 1, 7, 10_007):
                for dtype in (torch.float32, torch.bfloat16):
                    before = transport.traffic.sent_bytes()
                    tensors = [torch.full((numel,), float(rank + 1), dtype=dtype) for _ in range(2)]
                    works = [WholeExchange(run(collective, transport, (tensor,), what=name)) for tensor in tensors]
                    for work in works:
                        work.wait()
                    expected = torch.full((numel,), size * (size + 1) / 2, dtype=dtype)
                    right = all(torch.equal(tensor, expected) for tensor in tensors)
                    sent = transport.traffic.sent_bytes() - before
                    predicted = 2 * price(collective, numel * dtype.itemsize).sent_bytes[rank]
                    found[f"{name} {numel} {dtype}"] = right and sent == predicted
        transport.close()
        for strategy in ("ring", "halving_doubling", "hierarchical", "auto"):
            found[strategy] = _trained(f"bsp / all_reduce({strategy}) / none / wfbp", steps)
        found["ddp"] = _ddp(steps)
    return found


def _trained(strategy: str, steps: int) -> dict[str, torch.Tensor]:
    model = mlp()
    optimizer = sgd(model)
    with laconic.attach(model, optimizer, strategy, timeout_s=20):
        for step in range(steps):
            mlp_loss(model, step, dist.get_rank()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return snapshot(model)


def _ddp(steps: int) -> dict[str, torch.Tensor]:
    model = mlp()
    wrapped = DistributedDataParallel(model)
    optimizer = sgd(model)
    for step in range(steps):
        mlp_loss(wrapped, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model)
