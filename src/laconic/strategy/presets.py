"""Strategies people know by name."""

from __future__ import annotations

PRESETS: dict[str, tuple[str, str]] = {
    "ddp": ("bsp / all_reduce / none / fusion", "what torch's DistributedDataParallel does"),
    "ddp-fp16": ("bsp / all_reduce / fp16 / fusion", "DDP with its fp16 communication hook"),
    "ddp-bf16": ("bsp / all_reduce / bf16 / fusion", "DDP with its bf16 communication hook"),
    "ddp-bf16-ef": ("bsp / all_reduce / bf16 + error_feedback / fusion", "the same, keeping what rounding lost"),
    "bsp-a2a": ("bsp / all_reduce / none / sequential", "one all-reduce after the backward pass"),
    "wfbp-a2a": ("bsp / all_reduce / none / wfbp", "one all-reduce per tensor during the backward pass"),
}
"""name -> (strategy text, what it is)"""
