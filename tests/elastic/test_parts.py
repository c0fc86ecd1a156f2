"""The parts of elastic sessions that need no processes."""

from __future__ import annotations

import math
from itertools import chain
from typing import cast

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import laconic
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.tensor import TensorSpec
from laconic.errors import AttachError
from laconic.runtime.elastic.batches import Batches, FixedDivision, order_of
from laconic.runtime.elastic.division import Reader, Speeds, Split, sizes
from laconic.runtime.elastic.handover import HandOver
from laconic.runtime.elastic.settings import Elastic
from laconic.runtime.elastic.support import refuse_unsupported
from laconic.runtime.elastic.undo import Undo
from laconic.runtime.elastic.vote import _flags, _words, of_text, to_text
from laconic.runtime.job import Job
from laconic.strategy import Strategy


def _state(strategy: str, numel: int = 40) -> BucketState:
    spec = TensorSpec("weight", (numel,), torch.float32, torch.device("cpu"))
    return Strategy.parse(strategy).init(Bucket((spec,)))


@hypothesis.given(st.integers(1, 200), st.integers(1, 9), st.integers(0, 3))
def test_every_sample_of_a_step_is_in_exactly_one_part(size: int, ranks: int, epoch: int) -> None:
    order = order_of(size, epoch, seed=3, shuffled=True)
    assert sorted(order) == list(range(size))
    parts = Split(tuple(map(str, range(ranks)))).parts(order)
    assert list(chain.from_iterable(parts)) == order
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@hypothesis.given(st.integers(0, 200), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_ranks_that_share_a_replica_have_equal_parts_of_its_samples(
    size: int, replicas: int, alike: int, fast: bool
) -> None:
    samples = list(range(size))
    speeds = tuple(range(1000, 1000 + replicas)) if fast else ()
    split = Split(tuple(map(str, range(replicas))), speeds, alike)
    parts = split.parts(samples)
    readers = [Reader(index, alike) for index in range(alike)]
    own = [[reader.own(part) for reader in readers] for part in parts]
    assert list(chain.from_iterable(chain.from_iterable(own))) == samples[: size - size % alike]
    for part, of_ranks in zip(parts, own, strict=True):
        assert {len(one) for one in of_ranks} == {len(part) // alike}
        assert [part.index(one[0]) for one in of_ranks if one] == [r.first(len(part)) for r in readers if part]
    assert split.least == alike * replicas


@hypothesis.given(st.lists(st.booleans(), min_size=1, max_size=300))
def test_flags_arrive_as_they_were(flags: list[bool]) -> None:
    assert _flags(_words(flags), len(flags)) == of_text(to_text(flags), len(flags)) == tuple(flags)


@hypothesis.given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=300))
def test_texts_of_flags_can_be_joined(pairs: list[tuple[bool, bool]]) -> None:
    one, other = ([pair[place] for pair in pairs] for place in (0, 1))
    both = f"{int(to_text(one), 16) | int(to_text(other), 16):x}"
    assert of_text(both, len(pairs)) == tuple(map(any, pairs))


@hypothesis.given(st.integers(0, 200), st.lists(st.integers(1, 10**6), min_size=1, max_size=6))
def test_parts_by_speed_end_as_early_as_they_can(count: int, speeds: list[int]) -> None:
    found = sizes(count, len(speeds), tuple(speeds))
    assert sum(found) == count
    if count < len(speeds):
        return
    assert min(found) >= 1
    last = max(size / speed for size, speed in zip(found, speeds, strict=True))
    # To end earlier, every rank that has more than one sample could have at most this many.
    most = [max(1, math.ceil(last * (1 - 1e-9) * speed) - 1) for speed in speeds]
    assert sum(most) < count or last == max(1 / speed for speed in speeds)


def test_all_ranks_divide_alike_also_after_one_has_missed_a_vote_or_joined() -> None:
    names = ("0.0", "0.1", "0.2")
    said = {"0.0": 3000, "0.1": 1000, "0.2": 3000}
    ahead, behind = Speeds(), Speeds()
    for unit in range(8):
        for one in (ahead, behind):
            one.unit_done(unit, said)
    assert ahead.split(names) == Split(names)  # until then equal
    ahead.unit_done(8, dict.fromkeys(names, 1))
    behind.unit_done(8, {})  # it counts, although the vote did not arrive here
    assert ahead.split(names) == behind.split(names) == Split(names, (3000, 1000, 3000))
    for one in (ahead, behind):
        one.view_changed()
    joined = Speeds()
    joined.used = behind.used
    for unit in (9, 16):
        for one in (ahead, behind, joined):
            one.unit_done(unit, {})
    survivors = ("0.1", "0.2", "0.3")
    assert ahead.split(survivors) == behind.split(survivors) == joined.split(survivors)
    assert ahead.split(survivors) == Split(survivors, (1000, 3000, 2000))


def test_more_ranks_than_samples_of_a_step_are_an_error_and_not_the_end_of_training() -> None:
    division = FixedDivision(Elastic(), rank=0, world_size=2)
    loader = DataLoader(TensorDataset(torch.zeros(32)), batch_size=8)
    batches = Batches(cast(Job, None), division, loader, epochs=3, seed=0)
    division.world_size = 9  # as if others had joined
    with pytest.raises(AttachError, match=r"8 samples is too small for 9 ranks.*max_ranks"):
        next(iter(batches))


def test_what_is_undone_is_as_it_was_bit_for_bit() -> None:
    state = _state("bsp / all_reduce / powersgd(2) + error_feedback")
    flat = torch.randn(40)
    for values in state.flat.values():
        values.normal_()
    for fields in state.whole.values():
        for name in fields:
            fields[name] = torch.randn_like(fields[name])
    flat_before = {name: value.clone() for name, value in state.flat.items()}
    whole_before = {field: {k: v.clone() for k, v in values.items()} for field, values in state.whole.items()}
    was = flat.clone()
    for _ in range(2):  # the same memory serves the next step
        undo = Undo.of(state)
        undo.take(flat, state)
        flat.zero_()
        for values in state.flat.values():
            values.add_(1.0)
        for fields in state.whole.values():
            for name in fields:
                fields[name] = torch.zeros(3)
        state.whole["made.during.the.exchange"] = {"weight": torch.ones(1)}
        undo.put_back(flat, state)
        assert torch.equal(flat, was)
        assert state.flat.keys() == flat_before.keys()
        assert all(torch.equal(state.flat[k], v) for k, v in flat_before.items())
        assert state.whole.keys() == whole_before.keys()
        assert all(torch.equal(state.whole[f][k], v) for f, x in whole_before.items() for k, v in x.items())


def test_a_residual_in_eight_bits_is_undone_and_handed_over() -> None:
    text, field = "bsp / all_reduce / topk(0.1) + error_feedback(residual=int8)", "error_feedback.residual"
    mine, theirs = _state(text), _state(text)
    for state in (mine, theirs):
        state.packed[field].write(torch.randn(state.bucket.numel))
    before = mine.packed[field].read()
    undo = Undo.of(mine)
    undo.take(None, mine)
    mine.packed[field].write(torch.ones(mine.bucket.numel))
    undo.put_back(None, mine)
    assert torch.equal(mine.packed[field].read(), before)
    hand_over = HandOver([mine], Strategy.parse(text).resize(), "stays", ["goes"])
    hand_over._received = [[theirs.packed[field].read()]]
    hand_over.apply()
    expected = before + theirs.packed[field].read()
    torch.testing.assert_close(mine.packed[field].read(), expected, rtol=0, atol=float(expected.abs().max()) / 127)
    assert not torch.equal(mine.packed[field].read(), before)


def test_what_a_leaving_rank_owes_is_added_once_and_to_the_last_bit() -> None:
    text = "bsp / all_reduce / topk(0.1) + error_feedback"
    mine, theirs = _state(text), _state(text)
    for state in (mine, theirs):
        state.flat["error_feedback.residual"].normal_()
    expected = mine.flat["error_feedback.residual"] + theirs.flat["error_feedback.residual"]
    hand_over = HandOver([mine], Strategy.parse(text).resize(), "stays", ["goes"])
    hand_over._received = [[theirs.flat["error_feedback.residual"].clone()]]
    hand_over.apply()
    assert torch.equal(mine.flat["error_feedback.residual"], expected)


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        ("bsp / parameter_server", "servers of parameter_server"),
        ("ssp / parameter_server", "servers of parameter_server"),
        ("bsp / gossip", "gossip keeps state for each pair"),
        ("bsp / choco / topk(0.1)", "choco keeps state for each pair"),
        ("bsp / all_reduce / none / priority", 'Use the schedule "fusion"'),
        ("bsp / all_reduce / none / dear", 'Use the schedule "fusion"'),
        ("bsp / all_reduce / none / mg_wfbp", 'Use the schedule "fusion"'),
        ("bsp / all_reduce / topk(0.1) + ef21", 'Use "error_feedback"'),
        ("bsp / sharded", "no rank has all of the model"),
        ("bsp / all_reduce(algorithm=auto)", "algorithm=auto measures among fixed ranks"),
        ("bsp / all_reduce(algorithm=hierarchical)", "made for fixed hosts"),
        ("bsp / all_reduce(algorithm=torus2d)", "does not fit"),
        ("onebit_adam", "keeps state on each rank"),
    ],
)
def test_strategies_that_cannot_be_elastic_are_refused_by_name(strategy: str, says: str) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(AttachError, match=says) as told:
        refuse_unsupported(Strategy.parse(strategy), model, dict(model.named_parameters()), laconic.Elastic())
    assert "cannot be elastic" in str(told.value)


def test_compressed_fsdp_is_refused_by_what_helps_in_an_elastic_job() -> None:
    """Without the advice for other jobs to give a process_group, which elastic refuses."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(AttachError, match="cannot be elastic: with sharded no rank has all of the model") as told:
        laconic.attach(model, optimizer, "bsp / sharded", elastic=laconic.Elastic())
    assert "process_group" not in str(told.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"min_ranks": 0}, "min_ranks must be a whole number >= 1"),
        ({"min_ranks": 4, "max_ranks": 2}, "max_ranks must be >= min_ranks"),
        ({"batch": "whole"}, 'batch must be "global" or "local"'),
        ({"carry": [object()]}, "has no state_dict"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], says: str) -> None:
    with pytest.raises(AttachError, match=says):
        laconic.Elastic(**settings)  # pyrefly: ignore[bad-argument-type]


def test_a_session_that_is_not_elastic_has_no_batches() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with laconic.attach(model, optimizer, "bsp", transport=laconic.InProcessCluster(1).transport(0)) as session:
        assert session.views == []
        with pytest.raises(AttachError, match=r"elastic=laconic\.Elastic"):
            session.batches(torch.utils.data.DataLoader([1, 2]))  # pyrefly: ignore[bad-argument-type]
