"""Specs, buckets and payloads: sizes and places."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laconic.core.payload import Payload
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5), (2, 0, 4), (2, 3, 4)])
def test_spec_matches_the_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.empty(shape, dtype=dtype)
    spec = TensorSpec.of("layer.weight", tensor)
    assert spec == TensorSpec("layer.weight", shape, dtype, torch.device("cpu"))
    assert spec.numel == tensor.numel()
    assert spec.nbytes == tensor.nbytes
    assert isinstance(spec.shape, tuple)
    assert type(spec.shape) is tuple


SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=8)


@given(SHAPES, st.sampled_from(DTYPES))
def test_bucket_is_its_tensors_side_by_side(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    tensors = [torch.ones(shape).to(dtype) * index for index, shape in enumerate(shapes)]
    bucket = Bucket(tuple(TensorSpec.of(f"t{index}", tensor) for index, tensor in enumerate(tensors)))
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    assert bucket.numel == flat.numel()
    assert bucket.nbytes == flat.nbytes
    assert bucket.dtype == dtype
    assert bucket.device == torch.device("cpu")
    segments = bucket.segments()
    assert [spec for spec, _ in segments] == list(bucket.tensors)
    for (spec, place), tensor in zip(segments, tensors, strict=True):
        assert torch.equal(flat[place].reshape(spec.shape), tensor)


def test_payload_counts_every_tensor() -> None:
    payload = Payload((torch.empty(3, dtype=torch.float16), torch.empty(0), torch.empty(2, 2, dtype=torch.int64)))
    assert payload.nbytes == 3 * 2 + 0 + 4 * 8
    assert Payload(()).nbytes == 0
