"""How a model is spread over servers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from laconic.architecture import ParameterServer
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.strategy import Strategy

SMALLEST_BYTES = 65_536

sizes = st.lists(st.integers(0, 300_000), min_size=1, max_size=12)


@given(sizes, st.integers(1, 9))
def test_every_element_has_one_server_and_loads_are_even(numels: list[int], world_size: int) -> None:
    tensors = [TensorSpec(f"t{index}", (numel,)) for index, numel in enumerate(numels)]
    buckets = Strategy.parse("bsp / parameter_server / none / sequential").plan(tensors, world_size).buckets
    found: dict[str, list[tuple[int, int]]] = {}
    for bucket in buckets:
        for part in bucket.tensors:
            found.setdefault(part.owner, []).append((part.start, part.start + part.numel))
    for tensor in tensors:
        ends = sorted(found[tensor.name])
        assert ends[0][0] == 0
        assert ends[-1][1] == tensor.numel
        assert all(one[1] == other[0] for one, other in pairwise(ends))
    loads = [0] * world_size
    for bucket, server in zip(buckets, ParameterServer().servers.owners(buckets, world_size), strict=True):
        loads[server] += bucket.nbytes
    # No piece is larger than its share by more than what is not worth cutting off, at both ends.
    assert max(loads) <= 4 * sum(numels) / world_size + 2 * SMALLEST_BYTES


def test_tensors_stay_whole_where_their_shapes_count() -> None:
    large = [TensorSpec("embedding", (1000, 1000)), TensorSpec("bias", (1000,))]
    for text in (
        "bsp / parameter_server / powersgd + error_feedback",
        "ssp / parameter_server",
        "local_sgd / parameter_server",
    ):
        plan = Strategy.parse(text).plan(large, 4)
        assert {tensor.name for bucket in plan.buckets for tensor in bucket.tensors} == {"embedding", "bias"}
    cut = Strategy.parse("bsp / parameter_server / none / sequential").plan(large, 4)
    assert [bucket.nbytes for bucket in cut.buckets] == [1_001_000, 1_001_000, 1_001_000, 1_001_000]


def test_small_buckets_are_not_cut() -> None:
    small = Bucket((TensorSpec("small", (16_000,)),))
    assert Strategy.parse("bsp / parameter_server").plan(small.tensors, 4).buckets == (small,)
