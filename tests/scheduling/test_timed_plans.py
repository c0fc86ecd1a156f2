"""Plans made from measured times: the best cut, and front layers first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from laconic.core.plan import Bucket, Plan
from laconic.core.tensor import TensorSpec
from laconic.core.timing import Timing
from laconic.scheduling import MgWfbp, Priority, Wfbp
from laconic.scheduling.mg_wfbp import predicted_end_s

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
    plan = Priority(partition_bytes=4000).plan(tensors, observed=True, timing=Timing((0.0, 1.0, 2.0), 0.0, 1e-9))
    assert [bucket.tensors[0].name for bucket in plan.buckets] == ["last", "middle", "first"]
