"""A field in eight bits: what it keeps of values, and that nothing more is lost by saving it."""

from __future__ import annotations

import math

import pytest
import torch

from laconic.core.eight_bits import EightBits
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.tensor import TensorSpec

FIELD = "method.field"
TENSORS = (
    TensorSpec("even", (4, 128)),
    TensorSpec("bias", (5,)),
    TensorSpec("odd", (3, 100)),
    TensorSpec("none", (0,)),
)


def values(bucket: Bucket, seed: int = 0, scale: float = 1e-3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(bucket.numel, generator=generator) * scale
    return wide * torch.rand(bucket.numel, generator=generator) ** 4  # blocks whose values differ much in size


def by_formula(flat: torch.Tensor) -> torch.Tensor:
    """A block of at most 256 values, in plain numbers."""
    largest = max(flat.abs().tolist(), default=0.0)
    if not largest:
        return flat.clone()
    unit = 2.0 ** math.ceil(math.log2(largest / 127))
    return torch.tensor([round(value / unit) * unit for value in flat.tolist()])


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_each_block_of_each_tensor_has_a_unit_of_its_own(scale: float) -> None:
    bucket = Bucket(TENSORS)
    field, flat = EightBits(bucket), values(bucket, scale=scale)
    assert not field.read().any()
    field.write(flat)
    kept = field.read()
    for _, place in bucket.segments():
        for block, before in zip(kept[place].split(256), flat[place].split(256), strict=True):
            assert torch.equal(block, by_formula(before))
            if len(before):
                assert (block - before).abs().max() <= before.abs().max() / 127
    assert field.nbytes < 1.8 * bucket.numel, "blocks of small tensors are padded"
    assert EightBits(Bucket(TENSORS[:1])).nbytes == 512 + 2


@pytest.mark.parametrize("largest", [127.0, 127.49, 127.5, 128.0, 64.0, 63.9, 2.0**-140, 3.0e38, 0.0])
def test_what_is_kept_is_kept_again_in_the_same_bits_also_through_bfloat16(largest: float) -> None:
    bucket = Bucket((TensorSpec("w", (300,)),))
    field = EightBits(bucket)
    flat = values(bucket).clamp(-1, 1) * largest
    flat[7] = largest
    field.write(flat)
    kept, codes, exponents = field.read(), field.codes.clone(), field.exponents.clone()
    assert kept.isfinite().all()
    assert torch.equal(kept.to(torch.bfloat16).float(), kept)
    field.write(kept.to(torch.bfloat16))
    assert torch.equal(field.codes, codes)
    assert torch.equal(field.exponents, exponents)


def state(bucket: Bucket, seed: int | None = None) -> BucketState:
    made = BucketState(bucket)
    made.packed[FIELD] = EightBits(bucket)
    if seed is not None:
        made.packed[FIELD].write(values(bucket, seed))
    return made


def test_a_state_is_saved_by_parameter_and_restored_bit_for_bit_in_other_buckets() -> None:
    one = state(Bucket(TENSORS), seed=1)
    saved = one.by_parameter()
    assert {name: tuple(fields[FIELD].shape) for name, fields in saved.items()} == {
        tensor.name: tensor.shape for tensor in TENSORS
    }
    others = [state(Bucket((tensor,))) for tensor in reversed(TENSORS)]
    for other in others:
        other.restore(saved)
        for name, fields in other.by_parameter().items():
            assert torch.equal(fields[FIELD], saved[name][FIELD])
    assert sum(other.nbytes for other in others) == one.nbytes
    assert one.per_element() == {FIELD}


def test_a_scale_that_is_a_power_of_two_changes_no_digit() -> None:
    one = state(Bucket(TENSORS), seed=2)
    before = one.packed[FIELD].read()
    one.rescale(2.0**-5, {FIELD})
    assert torch.equal(one.packed[FIELD].read(), before * 2.0**-5)
    one.rescale(torch.tensor(3.0), {"another.field"})
    assert torch.equal(one.packed[FIELD].read(), before * 2.0**-5)
    one.start_anew({FIELD}, state(Bucket(TENSORS)))
    assert not one.packed[FIELD].read().any()
