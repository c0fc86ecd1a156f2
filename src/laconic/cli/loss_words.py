"""The cost of a strategy in loss, in words: as far as it was measured, and what to use instead."""

from __future__ import annotations

from functools import cache

from laconic.losses.measured import SMALL, in_words
from laconic.losses.steps_needed import SAME, measured_runs, steps_needed
from laconic.strategy import PRESETS, Strategy

_NEAR = 0.01
"""A loss that ends at most so much above that of torch DDP counts as kept."""
HOW_MEASURED = "at equal steps, compared with torch DDP: a small GPT with AdamW, docs/results/"


def loss_in_words(strategy: Strategy) -> str:
    """The measured loss, in words; not a whole sentence."""
    needed, runs = steps_needed(strategy), measured_runs(strategy)
    if needed is None:
        return "not measured"
    if needed is SAME:
        return "the same, because it computes what torch DDP computes"
    return in_words(runs) if runs else needed.because


def instead(strategy: Strategy) -> str:
    """A sentence that names presets that keep the loss, if this strategy is known not to; otherwise empty."""
    needed = steps_needed(strategy)
    return "" if needed is None or needed.loss_gap <= _NEAR else what_keeps_it()


@cache
def what_keeps_it() -> str:
    """A sentence with the lossy presets that end with torch DDP's loss, how much seeds differ, and larger models."""
    names = []
    for name in PRESETS:
        strategy = Strategy.parse(name)
        needed, runs = steps_needed(strategy), measured_runs(strategy)
        if needed is None or needed is SAME or not runs or needed.loss_gap > _NEAR:
            continue
        ran = sorted(runs, key=lambda run: (run.num_parameters, run.steps))
        longest = [run for run in ran if run.num_parameters <= SMALL][-1]
        larger = [f"; {run.loss_gap:+.1%}{run.model}" for run in ran[-1:] if run.loss_gap > _NEAR]
        names.append(f"{name} (+-{longest.noise:.1%}{''.join(larger)})")
    return (
        f"On average of seeds (+- their deviation), these end within {_NEAR:.0%} of torch DDP's loss: "
        f"{', '.join(names)}."
    )
