"""What is compared: rows, each a strategy and how it is trained, in groups. A new group is a new entry in GROUPS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.convergence.recipe import Recipe
from laconic import Strategy
from laconic.compression import COMPRESSORS, ErrorFeedback, NoCompression, SignSgd, Wrapper

_ADAM = Recipe(optimizer="adamw", learning_rate=3e-3)
_SGD = Recipe(optimizer="sgd", learning_rate=0.1)
_SGD_MOMENTUM = Recipe(optimizer="sgd", learning_rate=0.1, momentum=0.9)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A strategy, and the training it is meant for."""

    group: str
    method: str
    """What --only names."""
    title: str
    """The part of the strategy that the group is about."""
    strategy: Strategy
    recipe: Recipe | None = None
    """None: the usual one of the task."""
    beside: Recipe | None = None
    """How the uncompressed run is trained that it is compared with; None: the usual one."""


def _compression_row(group: str, text: str) -> Row:
    strategy = Strategy.parse(f"bsp / all_reduce / {text}")
    recipe = beside = None
    *_, base = strategy.compression.layers()
    if strategy.compression.traits.accumulates:
        # It adds the momentum itself, on the workers.
        recipe, beside = _SGD, _SGD_MOMENTUM
    elif isinstance(base, SignSgd):
        # A vote is +1 or -1 whatever the gradient is, so a rate for SGD means nothing to it.
        recipe = beside = _ADAM
    title = str(strategy.compression)
    return Row(group=group, method=base.name, title=title, strategy=strategy, recipe=recipe, beside=beside)


def compression(steps: int) -> list[Row]:
    """Every method with its defaults, and with error feedback where it wants that."""
    plain = [kind() for kind in COMPRESSORS if not issubclass(kind, Wrapper) and kind is not NoCompression]
    return [
        _compression_row("compression", str(ErrorFeedback(method) if method.traits.wants_error_feedback else method))
        for method in plain
    ]


def gentler(steps: int) -> list[Row]:
    """Other settings and wrappers for methods that end far from the uncompressed loss with their defaults."""
    # As many uncompressed steps as a quarter of the run: enough to see what a good start is worth.
    return [_compression_row("gentler", text.replace("QUARTER", str(max(1, steps // 4)))) for text in _GENTLER]


_GENTLER = (
    "ef_signsgd",
    "ef_signsgd + error_feedback + warmup(steps=QUARTER)",
    "onebit + error_feedback + warmup(steps=QUARTER)",
    "powersgd(rank=16) + error_feedback",
    "powersgd + error_feedback + warmup(steps=QUARTER)",
    "topk",
    "topk(density=10%) + error_feedback",
    "topk + error_feedback + warmup(steps=QUARTER)",
    "topk(density=10%) + error_feedback + warmup(steps=QUARTER)",
    "randomk(density=10%) + error_feedback + warmup(steps=QUARTER)",
    "threshold(tau=1e-4) + error_feedback",
    "dgc(density=1%, warmup_steps=QUARTER)",
    "sidco(density=10%) + error_feedback + warmup(steps=QUARTER)",
    "gtopk(density=10%) + error_feedback + warmup(steps=QUARTER)",
    "dct_topk + error_feedback + warmup(steps=QUARTER)",
)


def cells(steps: int) -> list[Row]:
    """Every cell of synchronization and architecture, beside bsp with an all-reduce."""
    return given([text.replace("QUARTER", str(max(1, steps // 4))) for text in _CELLS])


def given(texts: Sequence[str], group: str = "cells") -> list[Row]:
    """These strategies, beside bsp with an all-reduce."""
    rows = []
    for strategy in map(Strategy.parse, texts):
        parts = (strategy.synchronization, strategy.architecture, strategy.compression)
        # Signs are steps of length one per parameter, as AdamW's nearly are.
        recipe = _SIGNS if not strategy.synchronization.keeps_scale else None
        title = " / ".join(map(str, parts))
        rows.append(
            Row(
                group=group,
                method=strategy.synchronization.name,
                title=title,
                strategy=strategy,
                recipe=recipe,
                beside=_ADAM if recipe else None,
            )
        )
    return rows


_SIGNS = Recipe(optimizer="sgd", learning_rate=3e-3)
_CELLS = (
    "bsp / parameter_server",
    "ssp / parameter_server",
    "asp / parameter_server",
    "local_sgd(period=8) / parameter_server",
    "local_sgd(period=8)",
    "local_sgd(period=8, post_local=QUARTER)",
    "slowmo(period=8)",
    "diloco(period=32)",
    "streaming_diloco(period=32)",
    "streaming_diloco(period=32) / all_reduce / int4 + error_feedback",
    "diloco(period=32) / all_reduce / topk(density=3%) + chain(second=int4) + error_feedback",
    "decoupled_momentum(period=32) / all_reduce / dct_topk",
    "demo / all_reduce / dct_topk",
    "bsp / gossip",
    "bsp / gossip(topology=one_peer_exponential)",
    "bsp / push_sum",
    "bsp / choco / int8",
    "bsp / choco / topk(density=10%)",
    "local_sgd(period=8) / gossip",
    "asp / gossip",
    "asp / choco / int8",
)


def unlike(steps: int) -> list[Row]:
    """Rules that differ in what they do about replicas that drift apart, at a short and at a longer period."""
    texts = [text.replace("PERIOD", period) for period in ("4", "16") for text in _UNLIKE]
    return given(texts, group="unlike")


_UNLIKE = (
    "local_sgd(period=PERIOD)",
    "scaffold(period=PERIOD)",
    "fedprox(period=PERIOD)",
    "diloco(period=PERIOD)",
)

GROUPS: dict[str, Callable[[int], list[Row]]] = {
    "compression": compression,
    "gentler": gentler,
    "cells": cells,
    "unlike": unlike,
}
"""name -> its rows for a run of so many steps, in the order in which they are run"""
USUAL = ("compression", "gentler", "cells")
"""The groups where nothing else is asked for; with --skew it is "unlike"."""
