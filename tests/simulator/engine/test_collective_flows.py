"""Collectives at flow level: the textbook time where nothing is shared, and what sharing adds."""

from __future__ import annotations

import numpy as np
import pytest

from laconic.collectives.halving_doubling import halving_doubling
from laconic.collectives.ring import ring
from laconic.collectives.schedule import Collective, chunk_bounds
from laconic.errors import LaconicError
from laconic.simulator.engine import GraphBuilder, add_collective, run
from tests.collectives.layouts import collective, every_algorithm
from tests.simulator.engine.fabrics import racks, switch

RATE = 1e9


@pytest.mark.parametrize("size", [2, 3, 8, 17])
def test_ring_without_sharing_takes_alpha_and_beta_times_their_counts(size: int) -> None:
    alpha_s, nbytes = 3e-6, 16 * size * 1000
    builder = GraphBuilder()
    last = add_collective(builder, ring(size), nbytes, step_latency_s=alpha_s)
    outcome = run(builder.build(switch(size, RATE)))
    assert outcome.end_s[last] == pytest.approx(2 * (size - 1) * (alpha_s + nbytes / size / RATE), rel=1e-12)


@pytest.mark.parametrize("size", [2, 8, 32])
def test_halving_doubling_without_sharing(size: int) -> None:
    alpha_s, nbytes = 3e-6, 16 * size * 1000
    builder = GraphBuilder()
    last = add_collective(builder, halving_doubling(size), nbytes, step_latency_s=alpha_s)
    outcome = run(builder.build(switch(size, RATE)))
    expected = 2 * np.log2(size) * alpha_s + 2 * (size - 1) / size * nbytes / RATE
    assert outcome.end_s[last] == pytest.approx(expected, rel=1e-12)


def test_ring_over_racks_is_as_slow_as_its_narrowest_link() -> None:
    # Of each rack one flow leaves in every step: an uplink of half the rate halves the speed of all.
    nbytes = 16 * 8 * 1000
    builder = GraphBuilder()
    add_collective(builder, ring(8), nbytes)
    outcome = run(builder.build(racks(2, 4, RATE, RATE / 2)))
    assert outcome.makespan_s == pytest.approx(2 * 7 * nbytes / 8 / (RATE / 2))


def test_halving_doubling_over_racks_crosses_with_everyone_once() -> None:
    # The largest swap is between racks: four flows share an uplink of the rate of one.
    nbytes = 16 * 8 * 1000
    builder = GraphBuilder()
    add_collective(builder, halving_doubling(8), nbytes)
    outcome = run(builder.build(racks(2, 4, RATE, RATE)))
    assert outcome.makespan_s == pytest.approx(2 * nbytes / RATE * (4 / 2 + 1 / 4 + 1 / 8))


@every_algorithm
@pytest.mark.parametrize("nbytes", [0, 5, 1000, 99_991])
def test_every_byte_of_every_algorithm_is_sent(algorithm: str, nbytes: int) -> None:
    size = 7
    table = collective(algorithm, size)
    builder = GraphBuilder()
    last = add_collective(builder, table, nbytes, label=3)
    graph = builder.build(switch(size, RATE))
    chunk_bytes = np.diff(chunk_bounds(nbytes, table.num_chunks))
    sent, received = np.zeros(size), np.zeros(size)
    for row in table.rows():
        sent[row.source] += chunk_bytes[row.chunk]
        received[row.destination] += chunk_bytes[row.chunk]
    assert run(graph).link_bytes.tolist() == [*sent, *received]
    assert graph.num_tasks == table.num_steps == last + 1
    assert set(graph.label.tolist()) == {3}


def test_ranks_may_be_any_devices() -> None:
    builder = GraphBuilder()
    add_collective(builder, ring(3), 4800, ranks=[5, 1, 3])
    outcome = run(builder.build(switch(6, 100.0)))
    assert np.flatnonzero(outcome.link_bytes[:6]).tolist() == [1, 3, 5]
    assert outcome.makespan_s == pytest.approx(4 * 16)


def test_two_rings_on_the_same_links_take_twice_as_long() -> None:
    builder = GraphBuilder()
    for _ in range(2):
        add_collective(builder, ring(4), 16 * 4 * 100)
    outcome = run(builder.build(switch(4, 100.0)))
    assert outcome.makespan_s == pytest.approx(2 * 6 * 16)


def test_after_and_resource() -> None:
    builder = GraphBuilder()
    wire = builder.resource("wire")
    before = builder.timed(1.0)
    last = add_collective(builder, ring(2), 3200, resource=wire, priority=1.0, after=[before])
    between = builder.timed(5.0, resource=wire, priority=0.0, after=[before + 1])
    outcome = run(builder.build(switch(2, 100.0)))
    assert outcome.start_s[before + 1] == 1.0
    assert outcome.start_s[between] == 17.0
    assert outcome.end_s[last] == 38.0


def test_one_rank_has_nothing_to_send() -> None:
    builder = GraphBuilder()
    before = builder.timed(2.0)
    last = add_collective(builder, ring(1), 1000, after=[before])
    assert run(builder.build()).end_s[last] == 2.0


def test_wrong_ranks_and_sizes_are_refused() -> None:
    builder = GraphBuilder()
    with pytest.raises(LaconicError, match="a collective of 4 ranks needs as many devices"):
        add_collective(builder, ring(4), 100, ranks=[0, 1])
    with pytest.raises(LaconicError, match="must not be negative"):
        add_collective(builder, ring(4), -1)
    assert builder.num_tasks == 0


def test_rows_in_any_order_within_a_step_are_one_message_per_pair() -> None:
    # Rank 0 sends chunks 2 and 0 to rank 1, with a row of another pair between them.
    rows = np.array([[0, 0, 1, 2, 1], [0, 1, 0, 1, 1], [0, 0, 1, 0, 1]], dtype=np.int32)
    builder = GraphBuilder()
    add_collective(builder, Collective("made up", 2, 3, rows), 48)
    graph = builder.build(switch(2, 1.0))
    assert graph.num_tasks == 1
    assert sorted(graph.flows.num_bytes.tolist()) == [16.0, 32.0]
