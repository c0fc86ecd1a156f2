"""The sentence about one step."""

from __future__ import annotations

from laconic.report.results import NO_COMMUNICATION, TORCH_DDP
from laconic.report.sentences import in_words
from laconic.report.timeline import RankStep, Span

MIB = 2**20


def span(kind: str, start_ms: float, end_ms: float, bucket: int | None = None, **more: int) -> Span:
    return Span(kind=kind, start_s=start_ms / 1e3, duration_s=(end_ms - start_ms) / 1e3, bucket=bucket, **more)


def step(*spans: Span, ms: float = 402.0, alone_ms: float | None = None) -> RankStep:
    alone_s = None if alone_ms is None else alone_ms / 1e3
    return RankStep(begin_s=0.0, duration_s=ms / 1e3, alone_s=alone_s, spans=spans)


def exchange(bucket: int, start_ms: float, end_ms: float, *, mib: float = 1.0, age: int = 0) -> Span:
    return span("exchange", start_ms, end_ms, bucket, wire_bytes=int(mib * MIB), age=age)


def test_it_names_the_bucket_that_is_waited_for_longest() -> None:
    waits = span("wait", 300, 340, 3), span("wait", 340, 400, 4)
    found = step(exchange(3, 200, 340), exchange(4, 210, 400, mib=11.2), *waits)
    assert in_words(found, 23, "bsp") == (
        "step 23: 402 ms, of which 100 ms wait for communication; bucket 4 (11.2 MiB) is waited for longest, 60.0 ms"
    )


def test_waits_for_a_bucket_add_up_and_its_halves_too() -> None:
    waits = span("wait", 0, 30, 1), span("wait", 40, 80, 0), span("wait", 90, 120, 1)
    halves = exchange(1, -50, -10, mib=2.0, age=-1), exchange(1, 20, 120, mib=2.0, age=-1)
    assert "100 ms wait for communication; bucket 1 (4.0 MiB) is waited for longest, 60.0 ms" in in_words(
        step(*waits, *halves), 0, "bsp"
    )


def test_one_bucket_has_it_all() -> None:
    found = step(exchange(0, 200, 400, mib=97.5), span("wait", 300, 400, 0))
    assert (
        in_words(found, 1, "bsp")
        == "step 1: 402 ms, of which 100 ms wait for communication, all for bucket 0 (97.5 MiB)"
    )


def test_waiting_for_ones_own_work_is_told() -> None:
    found = step(
        exchange(0, 200, 400), span("wait", 300, 400, 0), span("encode", 280, 310, 0), span("decode", 350, 400, 0)
    )
    assert "100 ms wait for communication (60.0 ms of them encode and decode), all for bucket 0" in in_words(
        found, 1, "bsp"
    )


def test_what_goes_on_in_the_next_step_is_counted_and_its_waits_are_not() -> None:
    exchanges = exchange(0, 200, 300), exchange(1, 250, 450), exchange(2, 260, 500), exchange(2, -100, 60, age=-1)
    found = step(*exchanges, span("wait", 0, 60, 2), span("wait", 410, 500, 2, age=1))
    assert in_words(found, 5, "bsp") == (
        "step 5: 402 ms, of which 60.0 ms wait for communication, all for bucket 2 (1.0 MiB); "
        "exchanges of 2 of its 3 buckets end in the next step"
    )


def test_a_step_that_waits_for_nothing_or_exchanges_nothing_says_so() -> None:
    hidden = step(exchange(0, 200, 300), span("wait", 300, 301, 0))
    assert in_words(hidden, 5, "bsp") == "step 5: 402 ms, and next to nothing of it waits for communication"
    assert in_words(step(), 5, NO_COMMUNICATION) == "step 5: 402 ms; nothing is exchanged in it"
    assert in_words(step(span("wait", 300, 400), exchange(0, 1, 2)), 5, "bsp").endswith("100 ms wait for communication")


def test_torch_does_not_say_but_can_be_compared_with_itself_alone() -> None:
    passes = span("forward", 0, 100), span("backward", 100, 400)
    assert in_words(step(*passes, alone_ms=250), 5, TORCH_DDP) == (
        "step 5: 402 ms, of which about 150 ms wait for communication; torch does not say when it exchanges"
    )
    assert in_words(step(*passes), 5, TORCH_DDP) == "step 5: 402 ms; torch does not say when it exchanges"


def test_what_rests_most_of_the_time_says_so() -> None:
    found = step(exchange(0, 200, 400), span("wait", 300, 400, 0))
    assert in_words(found, 63, "diloco(period=64)").endswith("; everything is exchanged once in 64 steps")
