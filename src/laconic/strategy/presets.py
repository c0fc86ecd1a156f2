"""Strategies people know by name."""

from __future__ import annotations

PRESETS: dict[str, tuple[str, str]] = {
    "ddp": ("bsp / all_reduce / none / fusion", "what torch's DistributedDataParallel does"),
    "ddp-fp16": ("bsp / all_reduce / fp16 / fusion", "DDP with its fp16 communication hook"),
    "ddp-bf16": ("bsp / all_reduce / bf16 / fusion", "DDP with its bf16 communication hook"),
    "ddp-bf16-ef": ("bsp / all_reduce / bf16 + error_feedback / fusion", "the same, keeping what rounding lost"),
    "bsp-a2a": ("bsp / all_reduce / none / sequential", "one all-reduce after the backward pass"),
    "wfbp-a2a": ("bsp / all_reduce / none / wfbp", "one all-reduce per tensor during the backward pass"),
    "powersgd": ("bsp / all_reduce / powersgd + error_feedback / fusion", "PowerSGD of rank 4, as published"),
    "topk-ef": ("bsp / all_reduce / topk + error_feedback / fusion", "the largest 1% of the entries, the others later"),
    "topk-int8-ef": ("bsp / all_reduce / topk + chain + error_feedback / fusion", "the same with values of 8 bits"),
    "dgc": ("bsp / all_reduce / dgc / fusion", "deep gradient compression; for SGD without momentum"),
    "ef-signsgd": ("bsp / all_reduce / ef_signsgd + error_feedback / fusion", "scaled signs, the error later"),
    "onebit": ("bsp / all_reduce / onebit + error_feedback / fusion", "1-bit SGD"),
}
"""name -> (strategy text, what it is)

A preset that has the name of a method is what the literature calls so: that method with all it needs.
"""
