"""Train with Ray Train, with laconic in place of DDP: python examples/ray_train.py --workers 4

Not run by the tests, which have no Ray. Ray starts the workers and makes the process group; laconic uses it.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from ray import train  # pyrefly: ignore
from ray.train import ScalingConfig  # pyrefly: ignore
from ray.train.torch import TorchTrainer, prepare_model  # pyrefly: ignore
from torch import nn

import laconic


def train_on_worker(config: dict[str, Any]) -> None:
    """What each worker does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    # Onto this worker's device, but not into DistributedDataParallel.
    model = prepare_model(model, parallel_strategy=None)
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with laconic.attach(model, optimizer, config["strategy"], total_steps=config["steps"]) as session:
        for step in range(config["steps"]):
            torch.manual_seed(1000 * step + session.rank)
            inputs = torch.randn(32, 64, device=device)
            loss = (model(inputs) - inputs[:, :8].sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            train.report({"loss": loss.item(), "sent_bytes": session.traffic.sent_bytes("payload")})
        session.average()


def main() -> None:
    """Start the workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="give each worker a GPU")
    parser.add_argument("--strategy", default="diloco(period=8) / all_reduce / int4 + error_feedback")
    parser.add_argument("--steps", type=int, default=64)
    options = parser.parse_args()
    TorchTrainer(
        train_on_worker,
        train_loop_config={"strategy": options.strategy, "steps": options.steps},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
    ).fit()


if __name__ == "__main__":
    main()
