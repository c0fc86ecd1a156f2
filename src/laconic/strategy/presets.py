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
    "noloco": (
        "noloco / gossip(topology=random_pairs) / none / fusion",
        "DiLoCo without an all-reduce: 32 local steps, then an outer step with one random partner",
    ),
    "sparseloco": (
        "decoupled_momentum(lr=1, beta=0.95) / all_reduce / topk(density=0.03125, chunk=4096) + chain(second=twobit)"
        " / fusion",
        "SparseLoCo: 1 of 32 entries of the change in 2 bits every 32 steps, the others later; no outer momentum",
    ),
    "muloco": (
        "diloco / all_reduce / int4 + error_feedback / fusion",
        "MuLoCo: DiLoCo in 4 bits, for Muon as the inner optimizer",
    ),
    "des-loc": (
        "des_loc / all_reduce / none / fusion",
        "average parameters every 32 steps, Adam's moments every 96 and 192",
    ),
    "onebit-adam": (
        "onebit_adam / all_reduce / onebit + error_feedback / fusion",
        "Adam's momentum in one bit per value, after a tenth of the steps in 8 bits; needs total_steps",
    ),
    "zero-one-adam": (
        "zero_one_adam / all_reduce / onebit + error_feedback / fusion",
        "the same every 4 steps, with local steps between; needs total_steps",
    ),
    "demo-int4": (
        "demo / all_reduce / dct_topk(density=0.03125) + chain(second=int4) / fusion",
        "DeMo: 1 of 32 components of the momentum in 4 bits, and steps along signs; for SGD without momentum",
    ),
    "demo-cyclic": (
        "demo / all_reduce / dct_cyclic / fusion",
        "DeMo with components that ranks choose for all in turn: half the bytes of demo-int4 with 4 workers, less with "
        "more; for SGD without momentum",
    ),
    "d-psgd": ("bsp / gossip / none / fusion", "each replica mixes with its two neighbours on a ring"),
    "sgp": ("bsp / push_sum / none / fusion", "stochastic gradient push: one peer in turn, 1, 2, 4, ... places on"),
    "ad-psgd": ("asp / gossip / none / fusion", "pairs average in the background, without waiting"),
    "choco-sgd": ("bsp / choco / topk(density=0.1) / fusion", "gossip that sends one entry in ten"),
    "gossip-powersgd": ("bsp / power_gossip / powersgd / fusion", "gossip that sends differences of rank 4"),
    "downpour": ("asp / parameter_server / none / fusion", "servers apply each gradient when it arrives"),
    "ddp-fp16": ("bsp / all_reduce / fp16 / fusion", "DDP with its fp16 communication hook"),
    "ddp-bf16": ("bsp / all_reduce / bf16 / fusion", "DDP with its bf16 communication hook"),
    "ddp-bf16-ef": ("bsp / all_reduce / bf16 + error_feedback / fusion", "the same, with error feedback"),
    "bsp-a2a": ("bsp / all_reduce / none / sequential", "one all-reduce after the backward pass"),
    "bsp-ps": ("bsp / parameter_server / none / sequential", "servers form the mean after the backward pass"),
    "wfbp-ps": ("bsp / parameter_server / none / wfbp", "servers form the mean tensor by tensor"),
    "mg-wfbp": ("bsp / all_reduce / none / mg_wfbp", "gradients merged by measured times"),
    "bytescheduler-a2a": ("bsp / all_reduce / none / priority", "pieces, front layers first, waiting layer by layer"),
    "bytescheduler-ps": ("bsp / parameter_server / none / priority", "the same with servers"),
    "dear": ("bsp / all_reduce / none / dear", "half of each all-reduce in the next forward pass"),
    "wfbp-a2a": ("bsp / all_reduce / none / wfbp", "one all-reduce per tensor during the backward pass"),
    "powersgd": ("bsp / all_reduce / powersgd + error_feedback / fusion", "PowerSGD of rank 4, as published"),
    "topk-ef": ("bsp / all_reduce / topk + error_feedback / fusion", "the largest 1% of entries, with error feedback"),
    "topk-int8-ef": ("bsp / all_reduce / topk + chain + error_feedback / fusion", "the same with values of 8 bits"),
    "lags": (
        "bsp / all_reduce / topk + error_feedback / wfbp",
        "LAGS-SGD: the largest 1% of each layer as soon as its gradient is ready",
    ),
    "omgs": (
        "bsp / all_reduce / topk + error_feedback / mg_wfbp",
        "OMGS-SGD: the same, with layers merged by measured times and by what is sent of them",
    ),
    "cocktail": (
        "bsp / all_reduce / cocktail + chain(second=int4) + error_feedback / fusion",
        "CocktailSGD: the largest of randomly drawn entries in 4 bits, the others later",
    ),
    "dgc": ("bsp / all_reduce / dgc / fusion", "deep gradient compression; for SGD without momentum"),
    "sign-ef": ("bsp / all_reduce / ef_signsgd + error_feedback / fusion", "EF-SignSGD: scaled signs, error feedback"),
    "onebit": ("bsp / all_reduce / onebit + error_feedback / fusion", "1-bit SGD"),
}
"""name -> (strategy text, what it is)

A preset that has the name of a synchronization, up to hyphens and case, is that method by itself: "diloco" is
"diloco / all_reduce". A method of another axis cannot stand where a strategy stands, so a preset may have its name,
spelled as it is, and add what the method is published with: "powersgd" has error feedback.
"""

SEVEN = ("bsp-ps", "bsp-a2a", "wfbp-ps", "wfbp-a2a", "mg-wfbp", "bytescheduler-ps", "bytescheduler-a2a")
"""The lossless methods that the quantitative survey compares, under its names."""
