"""Strategies people know by name."""

from __future__ import annotations

PRESETS: dict[str, tuple[str, str]] = {
    "ddp": ("bsp / all_reduce / none / fusion", "what torch's DistributedDataParallel does"),
    "local-sgd": ("local_sgd / all_reduce / none / fusion", "average parameters every 32 steps"),
    "post-local-sgd": (
        "local_sgd(post_local=1000) / all_reduce / none / fusion",
        "average parameters in every step for 1000 steps, then every 32",
    ),
    "slowmo": ("slowmo / all_reduce / none / fusion", "local SGD with slow momentum"),
    "diloco": ("diloco / all_reduce / none / fusion", "32 local steps, then an outer Nesterov step"),
    "streaming-diloco-int4": (
        "streaming_diloco / all_reduce / int4 + error_feedback / fusion",
        "DiLoCo a quarter of the model at a time, in 4 bits, in the background",
    ),
    "sparseloco": (
        "diloco / all_reduce / topk(density=0.03) + chain(second=int4) + error_feedback / fusion",
        "DiLoCo that sends few entries of the change in few bits, the others later",
    ),
    "onebit-adam": (
        "onebit_adam / all_reduce / onebit + error_feedback / fusion",
        "Adam whose momentum travels in one bit, after a tenth of the steps in 8 bits; wants total_steps",
    ),
    "demo-int4": (
        "demo / all_reduce / dct_topk(density=0.03125) + chain(second=int4) / fusion",
        "DeMo: 1 of 32 components of the momentum in 4 bits, and steps along signs; for SGD without momentum",
    ),
    "d-psgd": ("bsp / gossip / none / fusion", "each replica mixes with its two neighbours on a ring"),
    "sgp": ("bsp / push_sum / none / fusion", "stochastic gradient push: one peer in turn, 1, 2, 4, ... places on"),
    "ad-psgd": ("asp / gossip / none / fusion", "pairs average in the background, nobody waits"),
    "choco-sgd": ("bsp / choco / topk(density=0.1) / fusion", "gossip that sends one entry in ten"),
    "downpour": ("asp / parameter_server / none / fusion", "servers apply each gradient as it comes"),
    "ddp-fp16": ("bsp / all_reduce / fp16 / fusion", "DDP with its fp16 communication hook"),
    "ddp-bf16": ("bsp / all_reduce / bf16 / fusion", "DDP with its bf16 communication hook"),
    "ddp-bf16-ef": ("bsp / all_reduce / bf16 + error_feedback / fusion", "the same, keeping what rounding lost"),
    "bsp-a2a": ("bsp / all_reduce / none / sequential", "one all-reduce after the backward pass"),
    "bsp-ps": ("bsp / parameter_server / none / sequential", "servers form the mean after the backward pass"),
    "wfbp-ps": ("bsp / parameter_server / none / wfbp", "servers form the mean tensor by tensor"),
    "mg-wfbp": ("bsp / all_reduce / none / mg_wfbp", "gradients merged as measured times say"),
    "bytescheduler-a2a": ("bsp / all_reduce / none / priority", "pieces, front layers first, waiting layer by layer"),
    "bytescheduler-ps": ("bsp / parameter_server / none / priority", "the same with servers"),
    "dear": ("bsp / all_reduce / none / dear", "half of each all-reduce in the next forward pass"),
    "wfbp-a2a": ("bsp / all_reduce / none / wfbp", "one all-reduce per tensor during the backward pass"),
    "powersgd": ("bsp / all_reduce / powersgd + error_feedback / fusion", "PowerSGD of rank 4, as published"),
    "topk-ef": ("bsp / all_reduce / topk + error_feedback / fusion", "the largest 1% of the entries, the others later"),
    "topk-int8-ef": ("bsp / all_reduce / topk + chain + error_feedback / fusion", "the same with values of 8 bits"),
    "dgc": ("bsp / all_reduce / dgc / fusion", "deep gradient compression; for SGD without momentum"),
    "sign-ef": ("bsp / all_reduce / ef_signsgd + error_feedback / fusion", "EF-SignSGD: scaled signs, the error later"),
    "onebit": ("bsp / all_reduce / onebit + error_feedback / fusion", "1-bit SGD"),
}
"""name -> (strategy text, what it is)

A preset that has the name of a synchronization, up to hyphens and case, is that method by itself: "diloco" is
"diloco / all_reduce". A method of another axis cannot stand where a strategy stands, so a preset may have its name,
spelled as it is, and add what the method is published with: "powersgd" has error feedback.
"""

SEVEN = ("bsp-ps", "bsp-a2a", "wfbp-ps", "wfbp-a2a", "mg-wfbp", "bytescheduler-ps", "bytescheduler-a2a")
"""The lossless methods that the quantitative survey compares, under its names."""
