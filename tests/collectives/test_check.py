"""Every algorithm is an all-reduce for any number of ranks, and what is not one is found out."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.collectives import ALGORITHMS, Collective
from laconic.collectives.check import BrokenCollective, check, check_programs
from laconic.collectives.schedule import Row, Turn, program
from tests.collectives.layouts import collective, every_algorithm, hosts_of_size

pytestmark = pytest.mark.timeout(120)


@pytest.mark.slow
@every_algorithm
@pytest.mark.parametrize("some", [range(1, 33), range(33, 49), range(49, 65)], ids=str)
def test_all_reduce_for_every_number_of_ranks(algorithm: str, some: range) -> None:
    for world_size in some:
        made = collective(algorithm, world_size)
        assert made.world_size == world_size
        assert (made.num_steps > 0) == (world_size > 1)
        check(made)


@pytest.mark.slow
@pytest.mark.parametrize("ranks_per_host", [1, 2, 4, 8, 16])
def test_hierarchical_on_other_hosts(ranks_per_host: int) -> None:
    for world_size in (*range(1, 20), 32, 63, 64):
        check(ALGORITHMS["hierarchical"](hosts_of_size(world_size, ranks_per_host)))
    # Ranks need not be numbered host by host.
    check(ALGORITHMS["hierarchical"](((0, 2, 4), (1, 3, 5))))
    check(ALGORITHMS["hierarchical"](((0, 5), (1, 2, 3, 4))))


def remade(made: Collective, rows: list[Row]) -> Collective:
    return Collective.of(made.algorithm, made.world_size, made.num_chunks, np.array(rows, dtype=np.int32))


def is_all_reduce(made: Collective) -> bool:
    """An independent judgement: values as lists of contributions, rows of a step applied in any order."""
    size = made.world_size
    held = {(rank, chunk): [rank] for rank in range(size) for chunk in range(made.num_chunks)}
    for step in range(made.num_steps):
        rows = [row for row in made.rows() if row.step == step]
        before = dict(held)
        if len({row[:4] for row in rows}) < len(rows):
            return False
        for row in rows:
            here, there = (row.destination, row.chunk), (row.source, row.chunk)
            if any((other.source, other.chunk) == here for other in rows):
                return False
            if not row.reduce and sum((other.destination, other.chunk) == here for other in rows) > 1:
                return False
            held[here] = held[here] + before[there] if row.reduce else before[there]
    # The same list everywhere: the same sum in the same order.
    return all(
        sorted(held[rank, chunk]) == list(range(size)) and held[rank, chunk] == held[0, chunk]
        for rank in range(size)
        for chunk in range(made.num_chunks)
    )


some_collective = st.builds(collective, st.sampled_from(list(ALGORITHMS)), st.integers(2, 9))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data(), some_collective, st.sampled_from(["drop", "double", "chunk", "destination", "reduce"]))
def test_a_changed_row_is_found(data: st.DataObject, made: Collective, change: str) -> None:
    rows = list(made.rows())
    place = data.draw(st.integers(0, len(rows) - 1))
    row = rows.pop(place)
    if change == "double":
        rows += [row, row]
    elif change == "chunk":
        rows.append(row._replace(chunk=(row.chunk + 1) % (made.num_chunks + 1)))
    elif change == "destination":
        rows.append(row._replace(destination=(row.destination + 1) % made.world_size))
    elif change == "reduce":
        rows.append(row._replace(reduce=not row.reduce))
    if not rows:
        return
    changed = remade(made, rows)
    if change in ("destination", "reduce") and is_all_reduce(changed):  # e.g. by a shorter way
        check(changed)
        return
    with pytest.raises(BrokenCollective) as error:
        check(changed)
    assert str(error.value).startswith(f"{made.algorithm}: ")
    assert re.search(r"rank \d+", str(error.value))
    assert re.search(r"chunk -?\d+", str(error.value))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data(), some_collective)
def test_crossed_steps_are_found_exactly_if_they_matter(data: st.DataObject, made: Collective) -> None:
    rows = list(made.rows())
    first, second = (data.draw(st.integers(0, len(rows) - 1)) for _ in range(2))
    one, other = rows[first], rows[second]
    rows[first], rows[second] = one._replace(step=other.step), other._replace(step=one.step)
    crossed = remade(made, rows)
    if is_all_reduce(crossed):
        check(crossed)
    else:
        with pytest.raises(BrokenCollective):
            check(crossed)


@settings(max_examples=100, deadline=None)
@given(st.data(), some_collective, st.sampled_from(["send", "receive", "swap", "stop"]))
def test_programs_that_do_not_meet_are_found(data: st.DataObject, made: Collective, change: str) -> None:
    programs = [list(program(made, rank)) for rank in range(made.world_size)]
    check_programs(programs)
    rank = data.draw(st.integers(0, made.world_size - 1))
    turns = programs[rank]
    busy = [step for step, turn in enumerate(turns) if turn.sends or turn.receives]
    step = data.draw(st.sampled_from(busy))
    turn = turns[step]
    if change == "swap":
        later = [other for other in busy if other > step and turns[other] != turn]
        if not later:
            return
        other = data.draw(st.sampled_from(later))
        turns[step], turns[other] = turns[other], turns[step]
        try:
            check_programs(programs)
        except BrokenCollective as error:
            assert re.search(r"step \d+", str(error))  # noqa: PT017 - some swaps do no harm
        return
    if change == "stop":
        del turns[step:]
    elif change == "send" and turn.sends:
        turns[step] = Turn(turn.sends[:-1], turn.receives)
    elif change == "receive" and turn.receives:
        turns[step] = Turn(turn.sends, turn.receives[:-1])
    else:
        return
    with pytest.raises(BrokenCollective, match=r"step \d+.*rank \d+"):
        check_programs(programs)


def test_two_ranks_that_wait_for_each_other_are_found() -> None:
    """Rank 0 sends and then receives, and so does rank 1, but in steps that never meet."""
    made = collective("tree", 2)
    to_0, from_0 = program(made, 1)
    with pytest.raises(BrokenCollective, match="step 0: rank 0 waits for ever to receive from rank 1"):
        check_programs([program(made, 0), [from_0, to_0]])


def test_a_sum_formed_on_two_ranks_is_refused_although_complete() -> None:
    """Ranks 0 and 1 both add what 3 has to what they share: with other trees their bits could differ."""
    rows = [Row(0, 2, 3, 0, True), Row(0, 0, 1, 0, True), Row(1, 1, 0, 0, False)]
    rows += [Row(2, 3, 1, 0, True), Row(2, 3, 0, 0, True), Row(3, 1, 2, 0, False), Row(3, 1, 3, 0, False)]
    with pytest.raises(BrokenCollective, match="chunk 0 is formed on rank 0 in step 2 for rank 0 and on rank 1"):
        check(Collective.of("by hand", 4, 1, np.array(rows)))
    copied = [row for row in rows if row != Row(2, 3, 0, 0, True)] + [Row(3, 1, 0, 0, False)]
    check(Collective.of("by hand", 4, 1, np.array(copied)))


def test_rows_outside_are_refused() -> None:
    for row, reason in [
        (Row(0, 0, 2, 0, True), "there are 2 ranks"),
        (Row(-1, 0, 1, 0, True), "steps begin at 0"),
        (Row(0, 0, 1, 5, True), "there are 1 chunks"),
        (Row(0, 1, 1, 0, True), "sends nothing to itself"),
    ]:
        with pytest.raises(BrokenCollective, match=reason):
            check(Collective.of("by hand", 2, 1, np.array([row])))
