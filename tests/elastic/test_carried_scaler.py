"""A GradScaler in the state that it will have after its next update."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.runtime.elastic.carried_scaler import CarriedScaler


@settings(max_examples=30)
@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 4))
def test_a_joiner_has_the_scale_that_the_others_have_after_their_update(overflows: list[bool], interval: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=interval)
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    carried = CarriedScaler(scaler)
    joiner = torch.amp.GradScaler("cpu")
    for overflow in overflows:
        assert carried.state_dict() == scaler.state_dict()  # between two steps nothing is due
        factor = torch.tensor(float("inf") if overflow else 1.0)
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(optimizer)
        foreseen = carried.state_dict()
        before = scaler.get_scale()
        scaler.update()
        assert foreseen == scaler.state_dict()
        assert scaler.get_scale() < before or not overflow
        optimizer.zero_grad()
        CarriedScaler(joiner).load_state_dict(foreseen)
        assert joiner.state_dict() == scaler.state_dict()


def test_a_scaler_that_is_off_has_no_state() -> None:
    off = CarriedScaler(torch.amp.GradScaler("cpu", enabled=False))
    assert off.state_dict() == {}
    off.load_state_dict({})
