"""Train a model that FSDP2 shards inside each group of ranks, and average between the groups with laconic.

torchrun --nproc-per-node 4 examples/sharded.py                          2 groups of 2 shards on this machine
torchrun --nnodes 2 --nproc-per-node 8 ... examples/sharded.py --groups 2          one group per host, 8 shards each
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import laconic


def main() -> None:
    """Train on random numbers and print how the loss falls."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2, help="groups of ranks, each with a whole model")
    parser.add_argument("--strategy", default="diloco(period=8) / all_reduce / int4 + error_feedback")
    parser.add_argument("--steps", type=int, default=64)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    shards = dist.get_world_size() // options.groups
    mesh = init_device_mesh(device, (options.groups, shards), mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)), nn.Linear(64, 1)).to(device)
    for block in model:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with laconic.attach(model, optimizer, options.strategy, process_group=mesh["replicate"]) as session:
        for step in range(options.steps):
            torch.manual_seed(1000 * step + dist.get_rank())
            inputs = torch.randn(32, 64, device=device)
            loss = (model(inputs) - inputs[:, :8].sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0 and step % 16 == 15:
                sent = session.traffic.sent_bytes("payload") / (step + 1)
                print(f"step {step + 1}: loss {loss.item():.4f}, {sent:.0f} bytes sent per step", flush=True)
        session.average()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
