"""Train a model that FSDP2 shards inside each replica, while replicas die, join and leave.

laconic run --nproc 4 --ranks-per-replica 2 examples/elastic_sharded.py        2 replicas of 2 shards on this machine
laconic lab --hosts 3 --ranks-per-host 2 --ranks-per-replica 2 --kill at=10s -- python examples/elastic_sharded.py
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import laconic


def main() -> None:
    """Train on random numbers and print how the loss falls."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="diloco(period=8) / all_reduce / int4 + error_feedback")
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")  # the ranks of this replica

    torch.manual_seed(0)
    inputs = torch.randn(4096, 64)
    data = TensorDataset(inputs, inputs[:, :8].sum(1, keepdim=True))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)), nn.Linear(64, 1)).to(device)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    elastic = laconic.Elastic(min_ranks=1, max_ranks=8)
    with laconic.attach(model, optimizer, options.strategy, elastic=elastic) as session:
        for batch, targets in session.batches(DataLoader(data, batch_size=128, shuffle=True), epochs=1000):
            loss = (model(batch.to(device)) - targets.to(device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if session.step % 16 == 0 and session.rank == 0 and dist.get_rank() == 0:
                print(f"step {session.step}: loss {loss.item():.4f}, {session.world_size} replicas", flush=True)
            if session.step >= options.steps:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
