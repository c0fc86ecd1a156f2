"""Digests stand for values and their places, on whatever device and in whatever memory."""

from __future__ import annotations

import pytest
import torch

from laconic.runtime import digest as module
from laconic.runtime.digest import as_numbers, digest, digests, piece_digest

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
@pytest.mark.parametrize("words", [5, 2**16])
def test_digests_of_pieces_add_up(dtype: torch.dtype, words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CPU_WORDS", words)
    values = (torch.arange(7 * 4 * 3) % 5).to(dtype).view(7, 4, 3)
    whole = int(piece_digest(values, values.shape, (0, 0, 0)))

    def of(*places: tuple[slice, slice, slice]) -> int:
        pieces = [piece_digest(values[place], values.shape, [part.start for part in place]) for place in places]
        return (sum(as_numbers(pieces)) + 2**63) % 2**64 - 2**63

    rows, columns, depths = slice(0, 7), slice(0, 4), slice(0, 3)
    assert whole == of(*((slice(start, min(start + 2, 7)), columns, depths) for start in (0, 2, 4, 6)))
    assert whole == of(*((rows, slice(start, start + 1), depths) for start in range(4)))
    assert whole == of(*((rows, columns, slice(start, start + 1)) for start in range(3)))
    boxes = [(slice(a, b), columns, slice(c, d)) for a, b in ((0, 4), (4, 7)) for c, d in ((0, 1), (1, 3))]
    assert whole == of(*boxes, (slice(7, 7), columns, depths))
    assert whole == int(piece_digest(values.transpose(0, 2).contiguous().transpose(0, 2), values.shape, (0, 0, 0)))
    changed = values.clone()
    changed[3, 1, 2] = 0 if bool(changed[3, 1, 2]) else 1
    assert whole != int(piece_digest(changed, values.shape, (0, 0, 0)))
    if dtype != torch.bool:
        assert whole != int(piece_digest(values[torch.tensor([1, 0, 2, 3, 4, 5, 6])], values.shape, (0, 0, 0)))


def test_the_digest_of_a_piece_is_as_described() -> None:
    values = torch.tensor([[3, -4, 5], [6, 7, 8]], dtype=torch.int16)
    expected = 0
    for row, numbers in enumerate(values.tolist()):
        for column, number in enumerate(numbers):
            place = (row + 2) * 10 + column + 4
            mixed = (number % 2**64) ^ (place * 0x9E3779B97F4A7C15 % 2**64)
            mixed = mixed * 0xBF58476D1CE4E5B9 % 2**64
            mixed ^= ((mixed - 2**64 if mixed >= 2**63 else mixed) >> 29) % 2**64
            expected += mixed * 0xBF58476D1CE4E5B9
    assert int(piece_digest(values, (9, 10), (2, 4))) % 2**64 == expected % 2**64
    assert int(piece_digest(torch.tensor(2.5), (), ())) == int(piece_digest(torch.tensor([2.5]), (1,), (0,)))


def test_numbers_of_digests_keep_their_order() -> None:
    found = [torch.tensor(number) for number in (3, -1, 2)]
    assert as_numbers(found) == [3, -1, 2]
    assert as_numbers([]) == []
