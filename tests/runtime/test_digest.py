"""Digests stand for values and their places, on whatever device and in whatever memory."""

from __future__ import annotations

import pytest
import torch

from laconic.runtime import digest as module
from laconic.runtime.digest import digest, digests, unordered_digest

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 2, 3, 7, 8, 9, 1000])
def test_every_value_and_every_place_counts(dtype: torch.dtype, numel: int) -> None:
    values = (torch.arange(numel) % 251).to(dtype)
    values[0] = 0
    known = {int(digest(values))}
    for place in range(0, numel, max(1, numel // 7)):
        changed = values.clone()
        changed[place] = 0 if bool(values[place]) else 1
        known.add(int(digest(changed)))
    assert len(known) == 1 + len(range(0, numel, max(1, numel // 7)))
    if numel > 2 and dtype != torch.bool:
        assert digest(values) != digest(values.flip(0))
        assert digest(values) != digest(values.roll(1))


def test_rows_in_another_order_are_noticed() -> None:
    values = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    assert digest(values) != digest(values.flip(0))
    assert digest(values) != digest(values[torch.randperm(64)])


def test_memory_does_not_count() -> None:
    values = torch.randn(6, 10)
    assert digest(values) == digest(values.t().contiguous().t())
    shifted = torch.empty(61)[1:]
    shifted.copy_(values.view(-1))
    assert digest(values.view(-1)) == digest(shifted)
    assert int(digest(torch.empty(0))) == 0


def test_pieces_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(5000)
    whole = digests([values, values[:7]])
    monkeypatch.setattr(module, "_CPU_WORDS", 64)
    assert digests([values, values[:7]]) == whole


@pytest.mark.parametrize("dtype", DTYPES)
def test_unordered_digests_of_pieces_add_up(dtype: torch.dtype) -> None:
    values = (torch.arange(21) % 5).to(dtype).view(7, 3)
    whole = unordered_digest(values)
    assert whole == sum(unordered_digest(values[start : start + 2]) for start in (0, 2, 4, 6))
    assert whole == whole + unordered_digest(values[7:])
    changed = values.clone()
    changed[3, 1] = 0 if bool(changed[3, 1]) else 1
    assert whole != unordered_digest(changed)
