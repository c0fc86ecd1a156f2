"""Indices as bytes: every coding gives back what it got, in the bytes that n and k alone determine."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from laconic.compression.kernels import indices as kernels
from laconic.compression.kernels.reference import indices as reference
from laconic.compression.wire.indices import CODINGS, decode_indices, encode_indices, indices_bytes, low_bits
from laconic.errors import MethodError

every_coding = pytest.mark.parametrize("coding", ["auto", *CODINGS])


@st.composite
def some_of_many(draw: st.DrawFn) -> tuple[int, torch.Tensor]:
    n = draw(st.integers(0, 300) | st.integers(65_000, 66_500) | st.integers(131_000, 200_000))
    k = draw(st.sampled_from([0, 1, 2, n // 100, n // 7, n // 2, n - 1, n]))
    k = max(0, min(n, k))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    crowded = draw(st.booleans())  # all in a row, at a random place, or spread out
    begin = generator.integers(0, n - k + 1)
    chosen = np.arange(begin, begin + k) if crowded else np.sort(generator.permutation(n)[:k])
    return n, torch.from_numpy(chosen.astype(np.int64))


@every_coding
@settings(max_examples=60, deadline=None)
@given(some_of_many())
@example((0, torch.empty(0, dtype=torch.int64)))
@example((1, torch.zeros(1, dtype=torch.int64)))
@example((2, torch.ones(1, dtype=torch.int64)))
def test_round_trip(coding: str, case: tuple[int, torch.Tensor]) -> None:
    n, chosen = case
    packed = encode_indices(chosen, n, coding)
    assert packed.dtype == torch.uint8
    assert packed.numel() == indices_bytes(n, chosen.numel(), coding)
    assert packed.numel() % 4 == 0
    found = decode_indices(packed, n, chosen.numel(), coding)
    assert found.dtype == torch.int64
    assert torch.equal(found, chosen)


@pytest.mark.parametrize("coding", ["bitmap", "packed"])
@settings(max_examples=60, deadline=None)
@given(case=some_of_many())
def test_compiled_loops_and_plain_torch_give_the_same_bytes(coding: str, case: tuple[int, torch.Tensor]) -> None:
    n, chosen = case
    k = chosen.numel()
    with pytest.MonkeyPatch.context() as patch:
        fast = encode_indices(chosen, n, coding)
        patch.setattr(kernels, "load_kernels", lambda family, device_type: reference)
        assert torch.equal(encode_indices(chosen, n, coding), fast)
        assert torch.equal(decode_indices(fast, n, k, coding), chosen)


@pytest.mark.parametrize(("n", "k"), [(7919, 80), (65_536, 700), (65_537, 656), (1_000_003, 1001), (1000, 500)])
def test_sizes_by_hand(n: int, k: int) -> None:
    def in_words(size: float) -> int:
        return math.ceil(size / 4) * 4

    blocks = math.ceil(n / 65_536)
    by_hand = {
        "int32": 4 * k,
        "int16": in_words(2 * k + (4 * blocks if blocks > 1 else 0)),
        "bitmap": in_words(n / 8),
        "packed": min(in_words(math.ceil(k * low / 8) + math.ceil((k + (n - 1) // 2**low) / 8)) for low in range(32)),
    }
    assert {coding: indices_bytes(n, k, coding) for coding in CODINGS} == by_hand
    assert indices_bytes(n, k) == min(by_hand.values())
    assert by_hand["packed"] * 8 <= k * (2 + math.log2(n / k)) + 64


def test_elias_fano_by_hand() -> None:
    # 3, 9 and 22 of 30: two low bits each (11, 01, 10), then 0, 2 and 5 in unary: bits 0, 3 and 7.
    assert low_bits(30, 3) in (2, 3)
    packed = torch.zeros(8, dtype=torch.uint8)
    reference.encode_packed(torch.tensor([3, 9, 22]), packed, 2)
    assert packed.tolist() == [0b10_01_11, 0b1000_1001, 0, 0, 0, 0, 0, 0]


@every_coding
@pytest.mark.parametrize("density", [0.0001, 0.001, 0.01, 0.1, 0.5, 0.9])
def test_more_indices_never_need_fewer_bytes(coding: str, density: float) -> None:
    """What bounds of methods that do not know k rely on; all of them is the exception, and needs nothing."""
    n = 100_003
    counts = range(int(density * n), int(density * n) + 50)
    assert all(indices_bytes(n, few, coding) <= indices_bytes(n, more, coding) for few, more in pairwise(counts))
    assert indices_bytes(n, n, coding) == indices_bytes(n, 0, coding) == 0


@every_coding
@pytest.mark.parametrize(
    "chosen",
    [[1, 1, 2], [2, 1], [-1, 2], [0, 10], list(range(11))],
    ids=["twice", "descending", "negative", "too large", "too many"],
)
def test_what_is_no_set_is_refused(coding: str, chosen: list[int]) -> None:
    with pytest.raises(MethodError, match="ascending, distinct and below 10"):
        encode_indices(torch.tensor(chosen), 10, coding)


def test_bytes_of_another_size_are_refused() -> None:
    with pytest.raises(AssertionError, match="8 bytes for 1 of 10 entries"):
        decode_indices(torch.zeros(8, dtype=torch.uint8), 10, 1, "int32")
