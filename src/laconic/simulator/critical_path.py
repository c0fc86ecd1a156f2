"""Why a step takes as long as it does: the tasks on its critical path, in words."""

from __future__ import annotations

from collections import defaultdict

from laconic.collectives.choice import NATIVE
from laconic.simulator.engine import Outcome
from laconic.simulator.lowering.task_graph import Label, TaskGraph
from laconic.units import human_bytes

_WORDS = {
    "sum": "all-reduce",
    "scatter_sum": "reduce-scatter",
    "gather": "all-gather",
    "scatter": "all-to-all",
    "scatter_inside": "all-to-all inside hosts",
    "scatter_between": "all-to-all between hosts",
    "send": "exchange with a partner",
    "mix": "exchange with neighbours",
    "serve": "way to the server and back",
    "aggregate": "sum on the path",
    "to_leaders": "sum inside hosts",
    "from_leaders": "handing out inside hosts",
}


def because(task_graph: TaskGraph, outcome: Outcome, first_s: float, end: int) -> tuple[tuple[str, float], ...]:
    """How the time from `first_s` to the end of task `end` is spent: words and share, the largest first."""
    groups: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    sizes: dict[int, int] = {}
    for task in outcome.critical_path(end):
        began_s = max(first_s, float(outcome.start_s[task]))
        if (took_s := float(outcome.end_s[task]) - began_s) > 0:
            label = task_graph.labels[task]
            groups[_words(label)][label.of] += took_s
            sizes[label.of] = max(label.nbytes, sizes.get(label.of, 0))  # decoding is labelled without bytes
    total_s = float(outcome.end_s[end]) - first_s
    found = [
        (_whole(words, buckets, sizes), sum(buckets.values()) / total_s) for words, buckets in groups.items() if total_s
    ]
    return tuple(sorted(found, key=lambda entry: -entry[1]))


def _words(label: Label) -> str:
    """The words for a task; they end in "of" where the name of a bucket follows."""
    if label.kind in {"forward", "backward"}:
        return "computes"
    if label.kind == "optimizer":
        return "is the optimizer's step"
    if label.kind in {"encode", "decode"}:
        return f"{label.kind}s"
    kind, _, algorithm = label.move.partition(" ")
    what = _WORDS[kind] if algorithm == NATIVE else f"{algorithm} {_WORDS[kind]}"
    start = f"waits for the {label.kind} of" if label.kind in {"latency", "start-up"} else "waits for"
    return f"{start} the {what} ({label.where}) of"


def _whole(words: str, buckets: dict[int, float], sizes: dict[int, int]) -> str:
    if not words.endswith(" of") and words not in {"encodes", "decodes"}:
        return words
    longest = max(buckets, key=lambda bucket: buckets[bucket])
    name = f"bucket {longest}"
    if words.endswith(" of"):
        name += f", {human_bytes(sizes[longest])}"
    return f"{words} {name}" if len(buckets) == 1 else f"{words} {len(buckets)} buckets (longest: {name})"
