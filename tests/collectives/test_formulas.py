"""Formulas against the price of the rows themselves."""

import pytest

from laconic.collectives import ALGORITHMS
from laconic.collectives.formulas import formula
from laconic.collectives.price import price
from laconic.core.hosts import hosts_alone

_CHUNKS_FIT = 1 << 24


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "hierarchical"])
@pytest.mark.parametrize("world_size", [*range(1, 34), 63, 64])
def test_a_formula_is_the_price_of_the_rows(algorithm, world_size):
    rows = price(ALGORITHMS[algorithm](hosts_alone(world_size)), _CHUNKS_FIT)
    found = formula(algorithm, world_size)
    assert found.num_steps == rows.num_steps
    # Chunks begin at multiples of 16 bytes, so a step may carry that much more than its share.
    assert found.serial_ratio * _CHUNKS_FIT == pytest.approx(rows.serial_bytes, abs=64 * (rows.num_steps + 1))
