"""Why a step takes as long as it does: the tasks that held up its end, in words."""

from __future__ import annotations

from collections import Counter

from laconic.simulator.engine import Outcome
from laconic.simulator.lowering.drawing import Drawing, Label
from laconic.units import human_bytes

_WORDS = {
    "sum native": "the all-reduce",
    "scatter_sum native": "the reduce-scatter",
    "gather native": "the all-gather",
    "scatter native": "the all-to-all",
    "send native": "the exchange with a partner",
    "mix native": "the exchange with neighbours",
    "serve native": "the way to the server and back",
    "to_leaders native": "the sum inside hosts",
    "from_leaders native": "handing out inside hosts",
}


def because(drawing: Drawing, outcome: Outcome, first_s: float, end: int) -> tuple[tuple[str, float], ...]:
    """What the time from `first_s` to the end of task `end` goes to: words and share, the largest first."""
    shares: Counter[str] = Counter()
    for task in outcome.critical_path(end):
        began_s = max(first_s, float(outcome.start_s[task]))
        if (took_s := float(outcome.end_s[task]) - began_s) > 0:
            shares[_words(drawing.labels[task])] += took_s
    total_s = float(outcome.end_s[end]) - first_s
    return tuple((words, took_s / total_s) for words, took_s in shares.most_common()) if total_s > 0 else ()


def _words(label: Label) -> str:
    if label.kind in {"forward", "backward"}:
        return "computes"
    if label.kind == "optimizer":
        return "is the optimizer's step"
    if label.kind in {"encode", "decode"}:
        return f"{label.kind}s bucket {label.of}"
    what = _WORDS.get(label.move) or f"the {label.move.split(' ', 1)[1]} all-reduce"
    return f"waits for {what} of bucket {label.of} ({human_bytes(label.nbytes)}, {label.where})"
