"""What every registered schedule promises, and fusion's buckets against torch's own."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.scheduling import Fusion, Schedule, Sequential, Wfbp
from tests.strategy.generate import variants

MIB = 1024**2
KINDS = [(torch.float32, "cpu"), (torch.bfloat16, "cpu"), (torch.float32, "meta"), (torch.float64, "cpu")]
SHAPES = (
    st.just(())
    | st.tuples(st.integers(0, 2000))
    | st.tuples(st.integers(1, 3000), st.integers(1, 3000))
    | st.just((1024, 256))  # exactly the first limit in fp32
    | st.just((2560, 2560))  # exactly 25 MiB in fp32
)


def _tensors(parts: list[tuple[tuple[int, ...], tuple[torch.dtype, str]]]) -> list[TensorSpec]:
    return [
        TensorSpec(f"p{index}", shape, dtype, torch.device(device))
        for index, (shape, (dtype, device)) in enumerate(parts)
    ]


TENSORS = st.lists(st.tuples(SHAPES, st.sampled_from(KINDS)), max_size=40).map(_tensors)
ONE_KIND = st.lists(st.tuples(SHAPES, st.just(KINDS[0])), max_size=60).map(_tensors)


@pytest.mark.parametrize("schedule", variants("scheduling"), ids=str)
@given(tensors=TENSORS, observed=st.booleans())
def test_every_tensor_is_in_exactly_one_bucket(schedule: Schedule, tensors: list[TensorSpec], observed: bool) -> None:
    plan = schedule.plan(tensors, observed=observed)
    placed = [tensor for bucket in plan.buckets for tensor in bucket.tensors]
    for tensor in tensors:
        pieces = sorted((t for t in placed if t.owner == tensor.name), key=lambda piece: piece.start)
        if schedule.cuts_tensors and len(pieces) > 1:
            ends = [piece.start + piece.numel for piece in pieces]
            assert [piece.start for piece in pieces] == [0, *ends[:-1]]
            assert ends[-1] == tensor.numel
        else:
            assert pieces == [tensor]
    assert {t.owner for t in placed} == {t.name for t in tensors}
    for bucket in plan.buckets:
        assert bucket.tensors, "no empty bucket"
        assert len({(tensor.dtype, tensor.device) for tensor in bucket.tensors}) == 1
    assert plan.launch in ("ready", "after_backward")
    # The same on every rank: equal specs, made anew, give the equal plan.
    again = schedule.plan([dataclasses.replace(tensor) for tensor in tensors], observed=observed)
    assert again == plan
    assert tensors == [dataclasses.replace(tensor) for tensor in tensors], "the list is not changed"


def _indices(buckets: tuple[Bucket, ...]) -> list[list[int]]:
    return [[int(tensor.name[1:]) for tensor in bucket.tensors] for bucket in buckets]


def _torch_buckets(tensors: list[TensorSpec], limits: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    """What torch's DDP makes of them: the buckets it closed, in order, and those left unfinished, in any order."""
    if not tensors:
        return [], []
    empty = [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in tensors]
    # Indices given: torch keeps the order of readiness instead of sorting, as in its rebuilt buckets.
    found, found_limits = dist._compute_bucket_assignment_by_size(
        empty, limits, [False] * len(tensors), list(range(len(tensors)))
    )
    closed, unfinished = [], []
    for bucket, limit in zip(found, found_limits, strict=True):
        full = sum(tensors[index].nbytes for index in bucket) >= limit
        (closed if full else unfinished).append(list(bucket))
    return closed, sorted(unfinished)


@settings(max_examples=300)
@given(tensors=TENSORS)
def test_fusion_equals_torch(tensors: list[TensorSpec]) -> None:
    ours = _indices(Fusion().plan(tensors, observed=True).buckets)
    closed, unfinished = _torch_buckets(tensors, [MIB, 25 * MIB])
    assert ours[: len(closed)] == closed
    assert sorted(ours[len(closed) :]) == unfinished


@pytest.mark.slow
@settings(max_examples=200)
@given(tensors=ONE_KIND, limits=st.lists(st.integers(1, 40 * MIB), min_size=2, max_size=2).map(sorted))
def test_fusion_equals_torch_with_other_limits(tensors: list[TensorSpec], limits: list[int]) -> None:
    first, limit = limits
    ours = _indices(Fusion.with_limits(first, limit).plan(tensors, observed=True).buckets)
    closed, unfinished = _torch_buckets(tensors, limits)
    assert ours == closed + unfinished


@given(tensors=TENSORS)
def test_fusion_closes_a_bucket_with_the_tensor_that_fills_it(tensors: list[TensorSpec]) -> None:
    seen: set[object] = set()
    buckets = Fusion(bytes=3 * MIB, first_bytes=MIB).plan(tensors, observed=True).buckets
    for index, bucket in enumerate(buckets):
        kind = (bucket.dtype, bucket.device)
        limit = 3 * MIB if kind in seen else MIB
        seen.add(kind)
        assert sum(tensor.nbytes for tensor in bucket.tensors[:-1]) < limit
        last_of_its_kind = all((later.dtype, later.device) != kind for later in buckets[index + 1 :])
        assert bucket.nbytes >= limit or last_of_its_kind


@given(tensors=TENSORS)
def test_before_anything_was_observed_fusion_sends_one_bucket_per_kind(tensors: list[TensorSpec]) -> None:
    buckets = Fusion().plan(tensors, observed=False).buckets
    assert len(buckets) == len({(tensor.dtype, tensor.device) for tensor in tensors})


@given(tensors=TENSORS, observed=st.booleans())
def test_sequential_sends_one_bucket_per_kind_after_the_backward_pass(
    tensors: list[TensorSpec], observed: bool
) -> None:
    plan = Sequential().plan(tensors, observed=observed)
    assert plan.launch == "after_backward"
    assert len(plan.buckets) == len({(tensor.dtype, tensor.device) for tensor in tensors})
    for bucket in plan.buckets:
        names = [tensor.name for tensor in bucket.tensors]
        assert names == [t.name for t in tensors if (t.dtype, t.device) == (bucket.dtype, bucket.device)]


@given(tensors=TENSORS)
def test_wfbp_sends_each_tensor_alone_in_the_order_of_readiness(tensors: list[TensorSpec]) -> None:
    assert Wfbp().plan(tensors, observed=True).launch == "ready"
    assert _indices(Wfbp().plan(tensors, observed=True).buckets) == [[index] for index in range(len(tensors))]
    backwards = [[index] for index in reversed(range(len(tensors)))]
    assert _indices(Wfbp().plan(tensors, observed=False).buckets) == backwards


@pytest.mark.parametrize("schedule", variants("scheduling"), ids=str)
def test_planning_many_tensors_is_fast(schedule: Schedule, request: pytest.FixtureRequest) -> None:
    """The plan is made in the middle of training; its cost must not grow with the square of the number of tensors."""
    tensors = [TensorSpec(f"p{index}", (64,)) for index in range(3_000)]
    taken_s = []
    for _ in range(3):
        started_s = time.thread_time()
        schedule.plan(tensors, observed=True)
        taken_s.append(time.thread_time() - started_s)
    assert min(taken_s) < 0.4
