"""What the communication thread issues at a time, and where it encodes and decodes."""

from __future__ import annotations

import pytest

from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.simulator.lowering.phases import Phase, phases_of
from laconic.simulator.lowering.task_graph import Inputs, RankClass
from laconic.simulator.network.analytic import AnalyticNetwork
from laconic.simulator.planning import settled
from laconic.strategy import Strategy
from laconic.workload import CodecCost
from tests.simulator.jobs import hosts, job

BUCKET = Bucket((TensorSpec("w", (512, 512)), TensorSpec("b", (512,))))
ENCODE_S, DECODE_S = 100.0, 1.0


def phases(text: str, workers: int = 4, *, ranks_per_host: int = 1, decoupled: bool = False) -> tuple[Phase, ...]:
    strategy = Strategy.parse(text)
    places = tuple(tuple(range(first, first + ranks_per_host)) for first in range(0, workers, ranks_per_host))
    network = AnalyticNetwork(hosts(workers))
    inputs = Inputs(
        strategy=settled(strategy, places, network, lambda: ()),
        workload=job((0, 0, 4)),
        world_size=workers,
        network=network,
        classes=(RankClass(workers),),
        codec=CodecCost(
            compressor=str(strategy.compression),
            encode_startup_s=ENCODE_S,
            encode_byte_s=0.0,
            decode_startup_s=DECODE_S,
            decode_byte_s=0.0,
            source="Made up.",
        ),
        hosts=places,
        moment=Moment.steady(workers),
    )
    return phases_of(inputs, BUCKET, decoupled=decoupled)


def kinds(found: tuple[Phase, ...]) -> list[list[str]]:
    return [[move.kind for move in phase.moves] for phase in found]


def times(found: tuple[Phase, ...]) -> list[tuple[float, float]]:
    return [(phase.before_s, phase.after_s) for phase in found]


def test_a_sum_is_encoded_decoded_and_waited_for_once() -> None:
    found = phases("bsp / all_reduce / fp16")
    assert (kinds(found), times(found)) == ([["sum"]], [(ENCODE_S, DECODE_S)])


def test_payloads_of_all_ranks_are_decoded() -> None:
    found = phases("bsp / all_reduce / int8(route=gather)", workers=6)
    assert (kinds(found), times(found)) == ([["gather"]], [(ENCODE_S, 6 * DECODE_S)])


def test_shares_are_decoded_added_up_and_encoded_again() -> None:
    found = phases("bsp / all_reduce / int8(route=scatter)")
    assert kinds(found) == [["scatter"], ["gather"]]
    assert times(found) == [(ENCODE_S, DECODE_S + ENCODE_S), (0.0, DECODE_S)]


def test_rounds_that_depend_on_each_other_encode_for_each() -> None:
    found = phases("bsp / all_reduce / powersgd")
    assert kinds(found) == [["sum"], ["sum"]]
    assert times(found) == [(ENCODE_S / 2, 0.0), (ENCODE_S / 2, DECODE_S)]


def test_what_is_made_side_by_side_is_issued_together() -> None:
    """Biases as they are, beside a matrix in two rounds."""
    found = phases("bsp / all_reduce / powersgd + per_layer(min_dims=2)")
    assert kinds(found) == [["sum", "sum"], ["sum"]]
    found = phases("bsp / all_reduce / int8(route=scatter) + per_layer(min_dims=2)")
    assert kinds(found) == [["sum", "scatter"], ["gather"]]


def test_halves_are_two_turns() -> None:
    found = phases("bsp / all_reduce / fp16 / dear", decoupled=True)
    assert (kinds(found), times(found)) == ([["scatter_sum"], ["gather"]], [(ENCODE_S, 0.0), (0.0, DECODE_S)])
    served = phases("bsp / parameter_server / fp16 / dear", decoupled=True)
    assert (kinds(served), times(served)) == ([["serve"], []], [(ENCODE_S, 0.0), (0.0, DECODE_S)])


def test_between_hosts_only_their_first_ranks_encode() -> None:
    text = "bsp / all_reduce(algorithm=hierarchical, compress=between_hosts) / int8(route={})"
    found = phases(text.format("gather"), workers=8, ranks_per_host=2)
    assert kinds(found) == [["to_leaders"], ["gather"], ["from_leaders"]]
    assert times(found) == [(0.0, 0.0), (ENCODE_S, 4 * DECODE_S), (0.0, 0.0)]
    found = phases(text.format("scatter"), workers=8, ranks_per_host=2)
    assert times(found) == [(0.0, 0.0), (ENCODE_S, DECODE_S + ENCODE_S), (0.0, DECODE_S), (0.0, 0.0)]


def test_neighbours_decode_what_each_has_sent_and_their_own() -> None:
    found = phases("bsp / choco / int8", workers=8)
    assert (kinds(found), times(found)) == ([["mix"]], [(ENCODE_S, 3 * DECODE_S)])


@pytest.mark.parametrize(
    ("algorithm", "workers", "steps"), [("ring", 4, 6), ("tree", 8, 6), ("torus2d", 9, 8), ("halving_doubling", 8, 6)]
)
def test_sums_of_our_own_begin_with_one_step(algorithm: str, workers: int, steps: int) -> None:
    first, rest = phases(f"bsp / all_reduce(algorithm={algorithm}) / fp16", workers)
    assert first.portion == pytest.approx(1 / steps)
    assert rest.portion == pytest.approx(1 - 1 / steps)
    assert times((first, rest)) == [(ENCODE_S, 0.0), (0.0, DECODE_S)]


def test_a_hierarchical_sum_has_the_steps_of_its_hosts() -> None:
    first, _ = phases("bsp / all_reduce(algorithm=hierarchical) / fp16", 12, ranks_per_host=4)
    assert first.portion == pytest.approx(1 / (2 * 3 + 2 * 2))


def test_one_rank_exchanges_nothing() -> None:
    assert phases("bsp / all_reduce / fp16", 1) == ()
    assert phases("asp / parameter_server / fp16", 1), "a server is somebody"
