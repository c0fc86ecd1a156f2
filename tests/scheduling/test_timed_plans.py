"""Plans made from measured times: the best cut, and front layers first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.core.plan import Bucket, Plan
from laconic.core.tensor import TensorSpec
from laconic.core.timing import Timing
from laconic.scheduling import MgWfbp, Priority, Wfbp
from laconic.scheduling.contract import partitions
from laconic.scheduling.mg_wfbp import predicted_end_s
from laconic.strategy import Strategy

JOBS = st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 0.05)), min_size=1, max_size=30)
LINKS = st.tuples(st.floats(0, 0.02), st.floats(1e-10, 1e-7))


def job(parts: list[tuple[int, float]], link: tuple[float, float]) -> tuple[list[TensorSpec], Timing, dict[str, float]]:
    tensors = [TensorSpec(f"p{index}", (numel,)) for index, (numel, _) in enumerate(parts)]
    ready, now = [], 0.0
    for _, gap in parts:
        now += gap
        ready.append(now)
    timing = Timing(tuple(ready), *link)
    return tensors, timing, dict(zip([tensor.name for tensor in tensors], ready, strict=True))


@given(JOBS, LINKS)
def test_mg_wfbp_is_never_predicted_worse_than_one_bucket_or_one_per_tensor(parts, link) -> None:
    tensors, timing, ready = job(parts, link)
    ours = predicted_end_s(MgWfbp().plan(tensors, observed=True, timing=timing), ready, timing)
    alone = predicted_end_s(Wfbp().plan(tensors, observed=True), ready, timing)
    fused = predicted_end_s(Plan((Bucket(tuple(tensors)),)), ready, timing)
    assert ours <= min(alone, fused) * (1 + 1e-12)


@given(JOBS.filter(lambda parts: len(parts) <= 9), LINKS)
def test_mg_wfbp_is_the_best_of_all_cuts(parts, link) -> None:
    tensors, timing, ready = job(parts, link)
    best = float("inf")
    for cuts in range(2 ** (len(tensors) - 1)):
        runs, run = [], []
        for index, tensor in enumerate(tensors):
            run.append(tensor)
            if cuts >> index & 1 or index == len(tensors) - 1:
                runs.append(Bucket(tuple(run)))
                run = []
        best = min(best, predicted_end_s(Plan(tuple(runs)), ready, timing))
    ours = predicted_end_s(MgWfbp().plan(tensors, observed=True, timing=timing), ready, timing)
    assert ours <= best * (1 + 1e-12)


@pytest.mark.parametrize(
    ("compression", "line", "groups"),
    [
        # 0.14 s each: the second and the third queue, and together they save a start-up.
        ("none", (0.04, 1e-7), [1, 2]),
        # 0.041 s each: the link is free before the next gradient is there.
        ("randomk(density=0.01)", (0.04, 1e-9), [1, 1, 1]),
        # Two rounds: 0.08 s each for start-ups alone, so they queue again.
        ("scalecom(density=0.01)", (0.08, 1.27e-9), [1, 2]),
    ],
)
def test_merges_are_planned_for_what_is_sent(compression: str, line: tuple[float, float], groups: list[int]) -> None:
    tensors = [TensorSpec(f"p{index}", (250_000,)) for index in range(3)]
    strategy = Strategy.parse(f"bsp / all_reduce / {compression} / mg_wfbp")
    found = strategy.exchange_line(tensors, 4, 0.04, 1e-7)
    assert found == pytest.approx(line, rel=0.01)
    plan = strategy.plan(tensors, 4, timing=Timing((0.0, 0.05, 0.1), *found))
    assert [len(bucket.tensors) for bucket in plan.buckets] == groups


def test_priority_sends_what_is_nearest_to_the_front_of_what_is_there() -> None:
    mib = 2**20
    tensors = [TensorSpec(name, (mib,)) for name in ("last", "middle", "first")]
    # 4 MiB take a second each; all gradients are there after the first piece has left.
    timing = Timing((0.0, 0.1, 0.2), 0.0, 1 / (4 * mib))
    plan = Priority(partition_bytes=2 * mib).plan(tensors, observed=True, timing=timing)
    assert [bucket.tensors[0].owner for bucket in plan.buckets] == [
        "last",
        "first",
        "first",
        "middle",
        "middle",
        "last",
    ]
    assert plan.deferred
    assert all(bucket.nbytes == 2 * mib for bucket in plan.buckets)


def test_priority_follows_the_backward_pass_where_the_link_is_fast() -> None:
    tensors = [TensorSpec(name, (1000,)) for name in ("last", "middle", "first")]
    plan = Priority(partition_bytes=4000).plan(tensors, observed=True, timing=Timing((0.0, 1.0, 2.0), 1.1e-6, 1e-9))
    assert [bucket.tensors[0].name for bucket in plan.buckets] == ["last", "middle", "first"]


def test_priority_does_not_begin_what_would_be_under_way_when_the_first_layer_is_there() -> None:
    tensors = [TensorSpec(name, (1000,)) for name in ("last", "middle", "first")]

    def owners(byte_s: float) -> list[str]:
        timing = Timing((0.0, 1e-6, 10e-6), 1100 * byte_s, byte_s)
        plan = Priority(partition_bytes=4000).plan(tensors, observed=True, timing=timing)
        return [bucket.tensors[0].owner for bucket in plan.buckets]

    # 4 us each, so that two are done by then, or 6.
    assert owners(1e-9) == ["last", "middle", "first"]
    assert owners(1.5e-9) == ["last", "first", "middle"]


@given(JOBS, LINKS)
def test_priority_cuts_the_same_pieces_whatever_the_times(parts, link) -> None:
    tensors, timing, _ = job(parts, link)
    schedule = Priority(partition_bytes=100_000)
    before, after = (schedule.plan(tensors, observed=True, timing=known) for known in (None, timing))
    assert {bucket.tensors for bucket in before.buckets} == {bucket.tensors for bucket in after.buckets}


PARTS = st.lists(st.integers(1, 5000), min_size=1, max_size=30)


@pytest.mark.slow
@given(PARTS, st.integers(4, 4000), st.integers(0, 6000))
def test_partitions_are_runs_that_cover_everything(sizes, nbytes, merged_bytes) -> None:
    tensors = [TensorSpec(f"p{index}", (numel,)) for index, numel in enumerate(sizes)]
    buckets = partitions(tensors, nbytes, merged_bytes=merged_bytes)
    parts = [part for bucket in buckets for part in bucket.tensors]
    assert [part.owner for part in parts] == sorted((part.owner for part in parts), key=lambda name: int(name[1:]))
    for tensor in tensors:
        begins = [(part.start, part.start + part.numel) for part in parts if part.owner == tensor.name]
        assert [begin for begin, _ in begins] == [0, *(end for _, end in begins[:-1])]
        assert begins[-1][1] == tensor.numel
        pieces = [part for part in parts if part.owner == tensor.name]
        assert max(part.nbytes for part in pieces) <= max(4, nbytes)
        assert max(part.numel for part in pieces) - pieces[0].numel == 0, "equal, but for the last"
    for bucket in buckets[:-1]:
        cut = any(part.part_of for part in bucket.tensors)
        assert cut or bucket.nbytes >= merged_bytes
        assert all(part.start == 0 for part in bucket.tensors[1:])
    assert all(bucket.nbytes < max(4, nbytes) + max(4, merged_bytes) for bucket in buckets)
