"""Pretrain a small language model as torchtitan does: FSDP2 inside a group, accumulation, clipping, a schedule, resume.

torchrun --nproc-per-node 4 examples/pretrain_fsdp2.py --folder checkpoints              2 groups of 2 shards
torchrun --nproc-per-node 4 examples/pretrain_fsdp2.py --folder checkpoints --resume 8   continue after step 8

The lines that are laconic's are marked with <--.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import laconic

VOCABULARY, WIDTH, LENGTH, BATCH = 64, 32, 16, 8


class LanguageModel(nn.Module):
    """A transformer that predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.output = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The scores of the next token at each place."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask)
        return self.output(hidden)


def parallelize(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Shard every block over the ranks of this group."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def batches(step: int, count: int, device: str) -> list[torch.Tensor]:
    """Micro-batches of one step: counting sequences, other ones on each rank."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    starts = torch.randint(VOCABULARY, (count, BATCH, 1), generator=generator)
    return list(((starts + torch.arange(LENGTH + 1)) % VOCABULARY).to(device))


def read_options() -> argparse.Namespace:
    """What is asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2, help="groups of ranks, each with a whole model")
    parser.add_argument("--strategy", default="diloco(period=4) / all_reduce / int4 + error_feedback")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--save-every", type=int, default=8)
    parser.add_argument("--resume", type=int, default=0, help="the step after which to continue")
    return parser.parse_args()


def main() -> None:
    """Train, save, resume, and print how the loss falls."""
    options = read_options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    shards = dist.get_world_size() // options.groups
    mesh = init_device_mesh(device, (options.groups, shards), mesh_dim_names=("replicate", "shard"))
    group = f"group-{mesh.get_local_rank('replicate')}"

    torch.manual_seed(0)
    model = LanguageModel().to(device)
    parallelize(model, mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (options.steps + 1))

    with laconic.attach(  # <--
        model, optimizer, options.strategy, process_group=mesh["replicate"], total_steps=options.steps
    ) as session:

        def state() -> dict[str, Any]:
            # Groups differ between rounds, so each of them saves its own model.
            of_session = session.state_dict()  # <-- before the model's
            of_model, of_optimizer = get_state_dict(model, optimizer)
            parts = {"model": of_model, "optimizer": of_optimizer, "schedule": schedule.state_dict()}
            return {**parts, "session": of_session}

        if options.resume:
            saved = state()
            place = options.folder / f"step-{options.resume}" / group
            dcp.load(saved, checkpoint_id=place, process_group=mesh["shard"].get_group())
            set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
            schedule.load_state_dict(saved["schedule"])
            session.load_state_dict(saved["session"])  # <-- after the model's

        for step in range(session.step, options.steps):
            parts = batches(step, options.accumulation, device)
            for index, tokens in enumerate(parts):
                with session.accumulate(index + 1 < len(parts)):  # <--
                    scores = model(tokens[:, :-1])
                    loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()) / len(parts)
                    loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if (step + 1) % options.save_every == 0:
                place = options.folder / f"step-{step + 1}" / group
                dcp.save(state(), checkpoint_id=place, process_group=mesh["shard"].get_group())
            if dist.get_rank() == 0:
                sent = session.traffic.sent_bytes("payload") / 1024
                print(f"step {step + 1}: loss {loss.item() * len(parts):.6f}, {sent:.0f} KiB sent", flush=True)
        session.average()  # <-- one model of all groups
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
