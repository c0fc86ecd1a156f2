"""cocktail: the largest of randomly drawn entries."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from laconic.compression import Chain, Cocktail, Int4, TopK
from laconic.compression.wire.draw import draw_of
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.errors import InvalidSetting
from tests.compression.test_laws import values

BUCKET = Bucket((TensorSpec("weight", (40, 50)), TensorSpec("bias", (60,))))
PLACES = (slice(0, 2000), slice(2000, 2060))


@pytest.mark.parametrize("compressor", [Cocktail(), Chain(Cocktail(), second=Int4())], ids=str)
def test_formula(compressor: Cocktail | Chain) -> None:
    flat, ever = values(0, 0, BUCKET.numel, torch.float32), np.zeros(BUCKET.numel, bool)
    state, out = compressor.init(BUCKET), torch.empty(BUCKET.numel)
    for step in range(60):
        state.moment = Moment(step, 1, 4, step)
        compressor.decode(compressor.encode(flat, state), out, state)
        drawn = draw_of(state, 0.1).indices(Moment(step, 3, 4, step)).numpy()  # the same on another rank
        expected = np.zeros(BUCKET.numel, bool)
        for place in PLACES:
            here = drawn[(drawn >= place.start) & (drawn < place.stop)]
            assert len(set(here.tolist())) == -(-(place.stop - place.start) // 10)
            by_size = here[np.argsort(-np.abs(flat.numpy()[here]))]
            expected[by_size[: int(np.ceil(0.02 * (place.stop - place.start)))]] = True
        if isinstance(compressor, Cocktail):
            assert np.array_equal(out.numpy(), np.where(expected, flat.numpy(), 0))
        else:
            assert not out.numpy()[~expected].any()
            for place in PLACES:
                largest = np.abs(np.where(expected, flat.numpy(), 0)[place]).max()
                assert np.abs(out.numpy() - np.where(expected, flat.numpy(), 0))[place].max() <= largest / 14 * 1.001
        ever |= expected
    assert ever.mean() > 5 * 0.02, "topk would send the same 2% for ever"


def test_places_take_fewer_bits_than_topk() -> None:
    bucket = Bucket((TensorSpec("weight", (1000, 1000)),))
    assert Cocktail().indices_bytes(bucket) < 0.6 * TopK(density=0.02).indices_bytes(bucket)


def test_there_must_be_something_to_choose_from() -> None:
    with pytest.raises(InvalidSetting, match="nothing to choose from"):
        Cocktail(density=0.1)
