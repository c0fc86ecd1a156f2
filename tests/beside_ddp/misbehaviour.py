"""Trials that go wrong in every way, for the test of the runner."""

from __future__ import annotations

import ctypes
import os
import threading
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
        if name == "deadlock":
            ctypes.PyDLL(None).sleep(60)  # keeps the interpreter's lock
        if name == "way out":
            threading.Thread(target=time.sleep, args=(60,)).start()  # the process waits for it
    dist.all_reduce(total)
    return f"sum {int(total)}"
