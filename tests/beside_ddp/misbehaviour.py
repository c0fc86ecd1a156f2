"""Trials that go wrong in every way, for the test of the runner."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist


def trial(name: str) -> str:
    """Do what the name says."""
    total = torch.ones(1)
    if dist.get_rank() == 1:
        if name == "raise":
            raise ValueError("rank 1 broke")
        if name == "exit":
            os._exit(7)
        if name == "hang":
            time.sleep(60)
    dist.all_reduce(total)
    return f"sum {int(total)}"
