"""How long contenders take turns."""

from __future__ import annotations

import pytest

from laconic.experiments.contest import _block_steps


@pytest.mark.parametrize(
    ("contenders", "least", "steps", "additional"),
    [
        (["torch DDP", "ddp"], 5, 5, 0),
        (["ddp", "local_sgd(period=3) / all_reduce"], 5, 6, 0),
        (["ddp", "local_sgd(period=16) / all_reduce"], 5, 16, 0),
        (["torch DDP"], 5, 5, 0),
        (["streaming_diloco(period=4, fragments=2, overlap=1) / all_reduce"], 5, 8, 2),
    ],
)
def test_a_turn_is_a_whole_number_of_the_longest_period(
    contenders: list[str], least: int, steps: int, additional: int
) -> None:
    assert _block_steps(contenders, least) == (steps, additional)
