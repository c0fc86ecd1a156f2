"""Compressor state: keyed by parameter, whatever the buckets are."""

from __future__ import annotations

import torch

from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.tensor import TensorSpec

A, B, C, EMPTY = TensorSpec("a", (2, 3)), TensorSpec("b", ()), TensorSpec("c", (4,)), TensorSpec("e", (0, 2))


def test_flat_fields_are_cut_by_parameter() -> None:
    state = BucketState(
        Bucket((A, B, EMPTY, C)), flat={"m.residual": torch.arange(11.0), "m.other": torch.arange(11.0) * 10}
    )
    saved = state.by_parameter()
    assert list(saved) == ["a", "b", "e", "c"]
    assert torch.equal(saved["a"]["m.residual"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(saved["b"]["m.residual"], torch.tensor(6.0))
    assert saved["e"]["m.residual"].shape == (0, 2)
    assert torch.equal(saved["c"]["m.other"], torch.tensor([70.0, 80.0, 90.0, 100.0]))


def test_whole_fields_belong_to_one_parameter() -> None:
    state = BucketState(Bucket((A, B, C)), whole={"m.basis": {"a": torch.ones(3, 1), "c": torch.zeros(2)}})
    saved = state.by_parameter()
    assert set(saved) == {"a", "c"}, "a parameter without state is not mentioned"
    assert torch.equal(saved["a"]["m.basis"], torch.ones(3, 1))


def test_restore_into_other_buckets() -> None:
    old = BucketState(
        Bucket((A, B, C)), {"m.r": torch.arange(11.0)}, {"m.q": {"a": torch.ones(2), "c": torch.full((3,), 2.0)}}
    )
    saved = old.by_parameter()
    first = BucketState(Bucket((C, A)), flat={"m.r": torch.zeros(10)}, whole={"m.q": {}})
    second = BucketState(Bucket((B,)), flat={"m.r": torch.zeros(1)}, whole={"m.q": {}})
    first.restore(saved)
    second.restore(saved)
    assert torch.equal(first.flat["m.r"], torch.tensor([7.0, 8, 9, 10, 0, 1, 2, 3, 4, 5]))
    assert torch.equal(second.flat["m.r"], torch.tensor([6.0]))
    assert torch.equal(first.whole["m.q"]["a"], torch.ones(2))
    assert torch.equal(first.whole["m.q"]["c"], torch.full((3,), 2.0))
    assert second.whole["m.q"] == {}


def test_restore_copies_and_leaves_what_was_not_saved() -> None:
    flat = {"m.r": torch.full((7,), 5.0), "m.s": torch.full((7,), 6.0)}
    state = BucketState(Bucket((A, B)), flat, {"m.q": {}})
    saved = {"a": {"m.r": torch.ones(2, 3), "m.q": torch.ones(2)}}
    state.restore(saved)
    saved["a"]["m.r"].zero_()
    saved["a"]["m.q"].zero_()
    assert torch.equal(state.flat["m.r"], torch.tensor([1.0] * 6 + [5.0]))
    assert torch.equal(state.flat["m.s"], torch.full((7,), 6.0))
    assert torch.equal(state.whole["m.q"]["a"], torch.ones(2))


def test_restore_keeps_the_fields_own_memory() -> None:
    flat = torch.zeros(6)
    state = BucketState(Bucket((A,)), flat={"m.r": flat})
    state.restore({"a": {"m.r": torch.ones(2, 3)}})
    assert state.flat["m.r"] is flat
    assert torch.equal(flat, torch.ones(6))


def test_states_do_not_share_containers() -> None:
    first, second = BucketState(Bucket((A,))), BucketState(Bucket((A,)))
    first.flat["x"] = torch.zeros(1)
    first.whole["y"] = {}
    assert second.flat == {}
    assert second.whole == {}


def test_parts_start_anew_too() -> None:
    def state(value: float) -> BucketState:
        inner = BucketState(Bucket((A,)), flat={"m.r": torch.full((6,), value), "m.s": torch.full((6,), value)})
        return BucketState(Bucket((A, B)), parts=[inner])

    changed = state(1.0)
    changed.start_anew({"m.r"}, state(0.0))
    assert torch.equal(changed.parts[0].flat["m.r"], torch.zeros(6))
    assert torch.equal(changed.parts[0].flat["m.s"], torch.ones(6))
