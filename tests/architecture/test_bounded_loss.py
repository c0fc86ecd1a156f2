"""Rows, the transform across them, the bytes that follow, and what bounded_loss is refused with."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laconic.architecture import BoundedLoss
from laconic.architecture.datagrams.rows import Rows
from laconic.architecture.datagrams.spread import BLOCK, gathered, spread
from laconic.compression import Bf16, NoCompression
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.errors import IllegalCombination
from laconic.strategy import Strategy


@given(st.integers(1, 200_000), st.integers(2, 9), st.sampled_from([2, 4, 8]))
def test_every_rank_owns_the_same_rows_with_little_padding(numel: int, world_size: int, item_bytes: int) -> None:
    rows = Rows(numel, world_size, item_bytes)
    assert rows.width * item_bytes <= 1440
    owned = rows.num_rows * rows.width
    assert numel <= world_size * owned < numel + world_size * (rows.num_rows + 1)
    assert rows.sent_bytes == 2 * (world_size - 1) * owned * item_bytes


@pytest.mark.parametrize(("numel", "world_size"), [(1, 2), (7, 4), (7919, 3), (100_003, 4)])
def test_values_come_back_from_their_owners(numel: int, world_size: int) -> None:
    rows, flat = Rows(numel, world_size, 4), torch.arange(numel, dtype=torch.float32)
    table = rows.cut(flat)
    owned = rows.by_owner(table)
    assert owned.shape == (world_size, rows.num_rows, rows.width)
    for row in range(len(table)):
        assert torch.equal(owned[row % world_size, row // world_size], table[row])
    assert torch.equal(rows.in_order(owned).reshape(-1)[:numel], flat)


@pytest.mark.parametrize("num_rows", [1, 2, 63, 64, 200])
def test_the_transform_keeps_lengths_and_is_undone(num_rows: int) -> None:
    table = torch.randn(num_rows, 5, generator=torch.Generator().manual_seed(num_rows), dtype=torch.float64)
    mixed = spread(table, 3)
    torch.testing.assert_close(mixed.square().sum(), table.square().sum())
    torch.testing.assert_close(gathered(mixed, 3), table)
    assert num_rows < 10 or not torch.allclose(gathered(mixed, 4), table), "few signs may be drawn alike"


def test_the_transform_is_a_hadamard_matrix_with_random_signs() -> None:
    signs = spread(torch.eye(BLOCK, dtype=torch.float64), 0) * BLOCK**0.5
    ones = torch.tensor([[(i & j).bit_count() for j in range(BLOCK)] for i in range(BLOCK)])
    hadamard = 1.0 - 2.0 * (ones % 2).double()
    torch.testing.assert_close(signs.abs(), torch.ones_like(signs))
    per_column = signs * hadamard
    assert torch.equal(per_column, per_column[:1].expand_as(per_column)), "H times one sign for each row of the input"
    assert per_column[0].unique().numel() == 2


def test_a_lost_row_takes_a_little_of_every_value() -> None:
    """Without the transform the largest value could be lost whole."""
    table = torch.zeros(BLOCK, 3)
    table[17] = torch.tensor([100.0, -50.0, 1.0])
    for lost in (0, 17, 63):
        mixed = spread(table, 1)
        mixed[lost] = 0
        wrong = (gathered(mixed, 1) - table).abs()
        torch.testing.assert_close(wrong, (table.abs().amax(0) / BLOCK).expand(BLOCK, 3), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("compression", "item_bytes"), [(NoCompression(), 4), (Bf16(), 2)])
def test_bytes_follow_from_rows(compression, item_bytes: int) -> None:
    bucket = Bucket((TensorSpec("weight", (64, 64)), TensorSpec("bias", (64,))))
    for world_size in (2, 3, 4):
        expected = Rows(64 * 65, world_size, item_bytes).sent_bytes
        assert BoundedLoss().sent_bytes(bucket, compression, Moment.steady(world_size)) == expected
    assert BoundedLoss().sent_bytes(bucket, compression, Moment.steady(1)) == 0


@pytest.mark.parametrize(
    ("text", "words", "nearest"),
    [
        ("bsp / bounded_loss / topk", 'what "topk" sends cannot simply be added up', "bsp / all_reduce / topk"),
        ("bsp / bounded_loss / powersgd", "cannot simply be added up", "bsp / all_reduce / powersgd"),
        ("bsp / bounded_loss / intsgd", "cannot simply be added up", "bsp / all_reduce / intsgd"),
        ("des_loc / bounded_loss", "des_loc averages moments of the optimizer", "des_loc / all_reduce / none"),
        ("onebit_adam / bounded_loss / fp16", "sends gradients by int8 at first", "onebit_adam / all_reduce / fp16"),
        ("bsp / bounded_loss / none / dear", "dear splits an all-reduce", "bsp / bounded_loss / none / fusion"),
        ("asp / bounded_loss", "asp does not wait for other workers", "asp / parameter_server / none"),
    ],
)
def test_what_cannot_lose_frames_is_refused_by_name(text: str, words: str, nearest: str) -> None:
    with pytest.raises(IllegalCombination) as caught:
        Strategy.parse(text)
    assert words in str(caught.value)
    assert f'Nearest that works: "{nearest}' in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "bsp / bounded_loss",
        "bsp / bounded_loss / bf16 / priority",
        "diloco / bounded_loss",
        "onebit_adam(first=bf16) / bounded_loss / fp16",
    ],
)
def test_what_adds_up_goes_with_it(text: str) -> None:
    assert Strategy.parse(text).architecture.loss_bound is not None
