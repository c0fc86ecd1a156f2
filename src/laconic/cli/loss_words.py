"""The cost of a strategy in loss, in words: as far as it was measured, and what to use instead."""

from __future__ import annotations

from functools import cache

from laconic.losses.steps_needed import SAME, steps_needed
from laconic.strategy import PRESETS, Strategy

_NEAR = 0.01
"""A loss that ends at most so much above that of torch DDP counts as kept."""
HOW_MEASURED = "at equal steps, compared with torch DDP: a small GPT with AdamW, docs/results/"


def loss_in_words(strategy: Strategy) -> str:
    """The measured loss, in words; not a whole sentence."""
    needed = steps_needed(strategy)
    if needed is None:
        return "not measured"
    if needed is SAME:
        return "the same, because it computes what torch DDP computes"
    return needed.because if needed.is_product else needed.because.partition(": loss ")[2]


def instead(strategy: Strategy) -> str:
    """A sentence that names presets that keep the loss, if this strategy is known not to; otherwise empty."""
    needed = steps_needed(strategy)
    return "" if needed is None or needed.loss_gap <= _NEAR else what_keeps_it()


@cache
def what_keeps_it() -> str:
    """A sentence with the lossy presets that end with torch DDP's loss."""
    found = {name: steps_needed(Strategy.parse(name)) for name in PRESETS}
    names = [
        name
        for name, needed in found.items()
        if needed is not None and needed is not SAME and not needed.is_product and needed.loss_gap <= _NEAR
    ]
    return f"These end within {_NEAR:.0%} of torch DDP's loss: {', '.join(names)}."
