"""One step in one sentence: how long it took, how much of it was waiting, and for what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from laconic.report.measures import strategy_of
from laconic.report.results import NO_COMMUNICATION, is_torchs_own
from laconic.report.timeline import RankStep, Span
from laconic.units import human_bytes

_NEGLIGIBLE = 0.005
"""The share of a step below which a time is not mentioned."""


def milliseconds(value: float) -> str:
    """A time with three digits or more from 1 ms on; units.js writes the same."""
    if 0 < value < 0.1:
        return f"{value:.2g}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def in_words(step: RankStep, number: int, strategy: str) -> str:
    """As in: step 23: 402 ms, of which 100 ms wait for communication; bucket 4 (11.2 MiB) is waited for longest."""
    begin = f"step {number}: {_ms(step.duration_s)}"
    if is_torchs_own(strategy) and strategy != NO_COMMUNICATION:
        return f"{begin}{_beyond_alone(step)}; torch does not say when it exchanges"
    exchanges = [span for span in step.spans if span.kind == "exchange"]
    if not exchanges:
        return f"{begin}; nothing is exchanged in it"
    return f"{begin}{_waiting(step)}{_going_on(step)}{_resting(strategy)}"


def _ms(seconds: float) -> str:
    return f"{milliseconds(seconds * 1e3)} ms"


def _beyond_alone(step: RankStep) -> str:
    """The additional time of the passes compared with no communication, in words; empty if unknown."""
    if step.alone_s is None:
        return ""
    passes_s = sum(span.duration_s for span in step.spans if span.kind in ("forward", "backward"))
    return f", of which about {_ms(max(0.0, passes_s - step.alone_s))} wait for communication"


def _waiting(step: RankStep) -> str:
    waits = [span for span in step.spans if span.kind == "wait" and span.age == 0]
    total_s = sum(span.duration_s for span in waits)
    if total_s < _NEGLIGIBLE * step.duration_s:
        return ", and next to nothing of it waits for communication"
    words = f", of which {_ms(total_s)} wait for communication"
    coding_s = _coding(step, waits)
    if coding_s >= _NEGLIGIBLE * step.duration_s:
        words += f" ({_ms(coding_s)} of them encode and decode)"
    by_bucket: dict[int, float] = defaultdict(float)
    for span in waits:
        if span.bucket is not None:
            by_bucket[span.bucket] += span.duration_s
    if not by_bucket:
        return words
    bucket = max(by_bucket, key=lambda number: by_bucket[number])
    sent = _sent_bytes(step, bucket)
    named = f"bucket {bucket}" if sent is None else f"bucket {bucket} ({human_bytes(sent)})"
    if len(by_bucket) == 1:
        return f"{words}, all for {named}"
    return f"{words}; {named} is waited for longest, {_ms(by_bucket[bucket])}"


def _coding(step: RankStep, waits: Sequence[Span]) -> float:
    """The part of the wait in which this rank's communication thread encoded or decoded."""
    work = [span for span in step.spans if span.kind in ("encode", "decode")]
    overlaps = (min(wait.end_s, span.end_s) - max(wait.start_s, span.start_s) for wait in waits for span in work)
    return sum(max(0.0, overlap_s) for overlap_s in overlaps)


def _sent_bytes(step: RankStep, bucket: int) -> int | None:
    """The bytes of a bucket's exchange, both halves where there are two; of one step if several are recorded."""
    for age in (0, -1):
        of_bucket = [span for span in step.spans if (span.kind, span.bucket, span.age) == ("exchange", bucket, age)]
        sent = [span.wire_bytes for span in of_bucket if span.wire_bytes is not None]
        if sent:
            return sum(sent)
    return None


def _going_on(step: RankStep) -> str:
    own = [span for span in step.spans if span.kind == "exchange" and span.age == 0]
    later = {span.bucket for span in own if span.end_s > step.begin_s + step.duration_s + 1e-4}
    if not later:
        return ""
    return f"; exchanges of {len(later)} of its {len({span.bucket for span in own})} buckets end in the next step"


def _resting(text: str) -> str:
    strategy = strategy_of(text)
    share = 1.0 if strategy is None else strategy.synchronization.rounds_per_step()
    return f"; everything is exchanged once in {1 / share:.3g} steps" if 0 < share < 1 else ""
