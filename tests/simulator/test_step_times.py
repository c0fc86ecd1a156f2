"""Step times against what follows by hand: closed forms, recurrences of a few lines, and timelines of two layers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.core.exchange import Move
from laconic.core.plan import Plan
from laconic.simulator import Conditions, Prediction, simulate
from laconic.simulator.network import LINK, Network, Passage
from laconic.workload import CodecCost, Workload
from tests.simulator.jobs import RATE, Line, hosts, job

SLOW = Line(byte_s=1e-6)
"""A second per megabyte, and nothing else."""
MEGABYTE = 1_000_000
TWO_LAYERS = job((1.0, 1.0, 2 * MEGABYTE), (1.0, 1.0, 2 * MEGABYTE))


def on_line(strategy: str, workload: Workload, network: Network, workers: int = 4, **conditions: object) -> Prediction:
    given = Conditions(**conditions) if conditions else None  # type: ignore[arg-type]
    return simulate(strategy, workload, hosts(workers), network=network, conditions=given).prediction


# -- gradients in every step -------------------------------------------------------------------------------------

layers = st.lists(
    st.tuples(st.floats(0, 0.02), st.floats(1e-4, 0.02), st.integers(1, 500_000).map(lambda count: 4 * count)),
    min_size=1,
    max_size=24,
)


def end_of_exchanges_s(workload: Workload, plan: Plan, network: Line) -> float:
    """When the last bucket is there, if buckets follow each other on one link: end = max(end, ready) + t."""
    now_s, ready = workload.forward_s, {}
    for layer in reversed(workload.layers):
        now_s += layer.backward_s
        ready |= {tensor.name: now_s for tensor in layer.tensors}
    end_s = latest_s = 0.0
    for bucket in plan.buckets:
        latest_s = max(latest_s, *(ready[tensor.owner] for tensor in bucket.tensors))
        end_s = max(end_s, latest_s) + network.startup_s + bucket.nbytes * network.byte_s
    return max(end_s + network.latency_s, now_s)


@settings(max_examples=40)
@given(parts=layers, byte_s=st.sampled_from([1e-10, 1e-8, 1e-7]), startup_s=st.sampled_from([0.0, 1e-4, 5e-3]))
def test_sequential_computes_and_then_exchanges_everything(parts, byte_s: float, startup_s: float) -> None:
    workload, network = job(*parts), Line(byte_s, startup_s, latency_s=1e-3)
    found = on_line("bsp / all_reduce / none / sequential", workload, network)
    assert found.step_s == pytest.approx(workload.compute_s + network.takes_s(workload.gradient_bytes))
    assert found.exposed_s == pytest.approx(network.takes_s(workload.gradient_bytes))
    moving_s = startup_s + workload.gradient_bytes * byte_s
    assert found.busy["network"] == pytest.approx(moving_s / found.step_s)


@settings(max_examples=60)
@given(
    parts=layers,
    byte_s=st.sampled_from([1e-10, 1e-8, 1e-7]),
    startup_s=st.sampled_from([0.0, 1e-4, 5e-3]),
    schedule=st.sampled_from(["wfbp", "fusion", "fusion(bytes=1MiB, first_bytes=200KiB)", "mg_wfbp"]),
)
def test_buckets_leave_when_they_are_ready_and_the_link_is_free(parts, byte_s, startup_s, schedule: str) -> None:
    workload, network = job(*parts), Line(byte_s, startup_s)
    found = on_line(f"bsp / all_reduce / none / {schedule}", workload, network)
    (plan,) = found.plans
    assert found.step_s == pytest.approx(end_of_exchanges_s(workload, plan, network), rel=1e-9)


@dataclass(frozen=True)
class Started:
    """A network on which exchanges are started one after the other, while bytes of those before move."""

    issue_s: float
    byte_s: float

    def passages(self, move: Move, world_size: int, num_servers: int) -> tuple[Passage, ...]:
        return (Passage(LINK, move.nbytes * self.byte_s, issue_s=self.issue_s),)

    def warnings(self) -> list[str]:
        return []


@settings(max_examples=60)
@given(parts=layers, byte_s=st.sampled_from([1e-9, 1e-8, 1e-7]), issue_s=st.sampled_from([1e-4, 5e-3]))
def test_three_exchanges_are_under_way_of_which_one_is_started(parts, byte_s: float, issue_s: float) -> None:
    workload = job(*parts)
    found = on_line("bsp / all_reduce / none / wfbp", workload, Started(issue_s, byte_s))
    (plan,) = found.plans
    now_s, ready = workload.forward_s, {}
    for layer in reversed(workload.layers):
        now_s += layer.backward_s
        ready |= {tensor.name: now_s for tensor in layer.tensors}
    ends_s, started_s = [0.0, 0.0, 0.0], 0.0
    for bucket in plan.buckets:
        (tensor,) = bucket.tensors
        # The third before it must have ended, and the last must have been started.
        started_s = max(ready[tensor.name], started_s, ends_s[-3]) + issue_s
        ends_s.append(max(started_s, ends_s[-1]) + bucket.nbytes * byte_s)
    assert found.step_s == pytest.approx(max(now_s, ends_s[-1]), rel=1e-9)


@settings(max_examples=60)
@given(
    parts=layers,
    byte_s=st.sampled_from([1e-10, 1e-8, 1e-7]),
    schedule=st.sampled_from(["sequential", "wfbp", "mg_wfbp", "dear", "priority", "priority(partition_bytes=100KB)"]),
)
def test_no_schedule_beats_what_the_first_layers_allow(parts, byte_s: float, schedule: str) -> None:
    workload, network = job(*parts), Line(byte_s)
    found = on_line(f"bsp / all_reduce / none / {schedule}", workload, network)
    assert found.step_s >= (1 - 1e-9) * workload.least_step_s(byte_s)


def test_what_the_first_layers_allow_can_be_reached() -> None:
    """Layer 1 is there and back in 2 s while layer 0 computes as long; layer 0's own 2 s nothing can hide."""
    assert TWO_LAYERS.least_step_s(1e-6) == 6.0
    small = "bsp / all_reduce / none / priority(partition_bytes=10KB, credit_bytes=10KB, merge=false)"
    assert on_line(small, TWO_LAYERS, SLOW).step_s == pytest.approx(6.0, rel=0.01)


@settings(max_examples=40)
@given(
    parts=layers,
    startup_s=st.sampled_from([1e-3, 1e-2]),
    byte_s=st.sampled_from([1e-9, 1e-8]),
    compression=st.sampled_from(["none", "randomk(density=0.1)"]),
)
def test_mg_wfbp_is_not_worse_than_one_bucket_or_one_per_tensor(
    parts, startup_s: float, byte_s: float, compression: str
) -> None:
    workload, network = job(*parts), Line(byte_s, startup_s)
    merged, alone, fused = (
        on_line(f"bsp / all_reduce / {compression} / {schedule}", workload, network).step_s
        for schedule in ("mg_wfbp", "wfbp", "sequential")
    )
    # Its start-up cost is that of 4 kB, as the runtime measures it.
    slack_s = len(parts) * 4096 * byte_s
    assert merged <= min(alone, fused) + slack_s + 1e-12


def test_latency_passes_while_others_move_but_only_eight_are_open() -> None:
    """Nine buckets at once: the ninth starts when the first is there, a second of bytes and nine of latency later."""
    workload = job(*((0.0, 0.0, MEGABYTE),) * 9, (0.0, 1.0, 0))
    network = Line(byte_s=1e-6, latency_s=9.0)
    found = on_line("bsp / all_reduce / none / wfbp", workload, network)
    assert found.step_s == pytest.approx(1.0 + (1.0 + 9.0) + (1.0 + 9.0))
    # With eight, bytes follow each other and one latency is waited for.
    eight = on_line("bsp / all_reduce / none / wfbp", job(*((0.0, 0.0, MEGABYTE),) * 8, (0.0, 1.0, 0)), network)
    assert eight.step_s == pytest.approx(1.0 + 8.0 + 9.0)


def test_priority_sends_front_layers_first_and_the_next_forward_pass_waits_layer_by_layer() -> None:
    strategy = "bsp / all_reduce / none / priority(partition_bytes=1000000, merge=false)"
    found = on_line(strategy, TWO_LAYERS, SLOW)
    (plan,) = found.plans
    assert [bucket.tensors[0].owner for bucket in plan.buckets] == ["l1.w", "l0.w", "l0.w", "l1.w"]
    # backward ends at 0; on the link: l1 until 0 (begun when it was ready), l0 until 2, l1 until 3
    # forward of l0 at 2 - 3, of l1 at 3 - 4, backward at 4 - 6
    assert found.step_s == pytest.approx(6.0)
    # Layer by layer, but in the order of the backward pass; and all after it.
    assert on_line("bsp / all_reduce / none / fusion", TWO_LAYERS, SLOW).step_s == pytest.approx(7.0)
    assert on_line("bsp / all_reduce / none / fusion(first_bytes=3000000)", TWO_LAYERS, SLOW).step_s == pytest.approx(
        8.0
    )


def test_credit_limits_what_is_under_way() -> None:
    """Without room for a second piece, every piece's latency is waited for before the next one starts."""
    network = Line(byte_s=1e-6, latency_s=0.5)
    text = "bsp / all_reduce / none / priority(partition_bytes=1000000, merge=false, credit_bytes={})"
    tight = on_line(text.format(1_000_000), TWO_LAYERS, network)
    wide = on_line(text.format(16_000_000), TWO_LAYERS, network)
    # 1.5 s for each piece: l1 until 0.5, l0 until 3.5, forward until 4.5 and, with l1 there at 5, until 6
    assert tight.step_s == pytest.approx(8.0)
    # the last piece of l0 leaves until 2 and is there at 2.5, forward until 3.5; l1 there at 3.5, forward until 4.5
    assert wide.step_s == pytest.approx(6.5)


def test_dear_gathers_during_the_next_forward_pass() -> None:
    found = on_line("bsp / all_reduce / none / dear(bytes=4)", TWO_LAYERS, SLOW, workers=2)
    # On this network a sum's first half takes 2 s for each layer, and gathering its shares 1 s.
    # backward ends at 0; first halves: l1 from -1 until 1, l0 until 3; second halves: l0 until 4, l1 until 5
    # forward of l0 at 4 - 5, of l1 at 5 - 6, backward at 6 - 8
    assert found.step_s == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("network", "splits"), [(Line(startup_s=1e-2), False), (None, True)], ids=["on a line", "on links"]
)
def test_dear_tries_a_few_sizes_and_unsplit_sums_and_keeps_the_best(network: Network | None, *, splits: bool) -> None:
    workload = job((0.01, 0.02, 30 << 20), (0.01, 0.02, 30 << 20), (0.01, 0.02, 30 << 20))
    sizes = [f"dear(bytes={size}MiB)" for size in (25, 4, 1)]
    found, unsplit, *split = (
        simulate(f"bsp / all_reduce / none / {name}", workload, hosts(4), network=network).prediction.step_s
        for name in ("dear", "fusion", *sizes)
    )
    assert found == pytest.approx(min(unsplit, *split))
    assert (found < unsplit) is splits


# -- what else a step consists of --------------------------------------------------------------------------------


def test_the_optimizer_waits_for_all_gradients() -> None:
    found = on_line("bsp / all_reduce / none / wfbp", TWO_LAYERS, SLOW, optimizer_s=0.5)
    assert found.step_s == pytest.approx(7.5)
    assert found.compute_s == pytest.approx(4.5)


def test_updates_that_wait_are_made_layer_by_layer() -> None:
    strategy = "bsp / all_reduce / none / priority(partition_bytes=1000000, merge=false)"
    found = on_line(strategy, TWO_LAYERS, SLOW, optimizer_s=1.0)
    # l0 is there at 2: its update, half of all, until 2.5, forward until 3.5; l1 is there at 3: update until 4
    assert found.step_s == pytest.approx(7.0)
    # Where gradients arrive in time, updates are what follows the backward pass.
    fast = on_line(strategy, TWO_LAYERS, Line(byte_s=1e-12), optimizer_s=1.0)
    assert fast.step_s == pytest.approx(5.0)


CODEC = CodecCost(
    compressor="int8(route=gather)",
    encode_startup_s=0.25,
    encode_byte_s=0.0,
    decode_startup_s=0.125,
    decode_byte_s=0.0,
    source="Made up.",
)


def test_encoding_and_decoding_are_part_of_an_exchange() -> None:
    workload = job((1.0, 1.0, 4 * MEGABYTE), codec=CODEC)
    found = on_line("bsp / all_reduce / int8(route=gather) / sequential", workload, SLOW)
    # Blocks of int8: a quarter of the bytes and a scale for each block; four payloads are decoded.
    moved_s = found.step_s - 2.0 - 0.25 - 4 * 0.125
    assert moved_s == pytest.approx(1.0, rel=0.02)
    assert not [warning for warning in found.warnings if "not known" in warning]
    unknown = on_line("bsp / all_reduce / int8(route=gather) / sequential", job((1.0, 1.0, 4 * MEGABYTE)), SLOW)
    assert unknown.step_s == pytest.approx(found.step_s - 0.75)
    assert [warning for warning in unknown.warnings if "not known" in warning]


def test_one_bucket_is_decoded_while_the_next_is_under_way() -> None:
    """The thread decodes what has arrived when it has started the next one, not before."""
    workload = job((0.0, 10.0, 4 * MEGABYTE), (0.0, 0.0, 4 * MEGABYTE), codec=CODEC)
    found = on_line("bsp / all_reduce / int8(route=gather) / wfbp", workload, SLOW)
    # The last layer's bucket is there long before the second begins, after 10 s and its encoding; both decodings follow
    # each other: the first one while the second bucket moves.
    assert found.step_s == pytest.approx(10.0 + 0.25 + 1.0 + 0.5, rel=0.01)


def test_rounds_that_depend_on_each_other_begin_when_the_last_bucket_has_come() -> None:
    """As in the runtime: rounds of a sum of our own, here 6 steps on a ring of 4, of which one is made in time."""
    workload = job((0.0, 3.0, MEGABYTE), (0.0, 3.0, MEGABYTE))
    native = on_line("bsp / all_reduce / none / wfbp", workload, SLOW)
    assert native.step_s == pytest.approx(6.0 + 1.0)
    ring = on_line("bsp / all_reduce(algorithm=ring) / none / wfbp", workload, SLOW)
    assert ring.step_s == pytest.approx(6.0 + 1.0 + 5 / 6)


def test_busy_is_what_a_steady_step_keeps_busy() -> None:
    found = on_line("bsp / all_reduce / none / wfbp", TWO_LAYERS, SLOW)
    assert found.busy == {"network": pytest.approx(4.0 / 7.0)}
    overlapped = on_line("bsp / gossip / none", TWO_LAYERS, SLOW)
    assert overlapped.busy == {"network": pytest.approx(1.0)}, "also where what is in flight outlasts a step"


# -- rounds of parameters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [1, 2, 8, 33])
def test_local_steps_share_one_exchange(period: int) -> None:
    for rule in (f"local_sgd(period={period})", f"slowmo(period={period})", f"diloco(period={period})"):
        found = on_line(rule, TWO_LAYERS, SLOW)
        assert found.step_s == pytest.approx((period * 4.0 + 4.0) / period)
    if period > 1:
        late = on_line(f"local_sgd(period={period}, post_local=100)", TWO_LAYERS, SLOW)
        assert late.step_s == pytest.approx((period * 4.0 + 4.0) / period), "what repeats, not how it begins"


def test_streaming_hides_what_fits_into_the_steps_that_overlap() -> None:
    text = "streaming_diloco(period=4, fragments=2, overlap={overlap}) / all_reduce / none"
    # Every two steps, of 4 s each, one of two parts begins, which takes 2 s.
    assert on_line(text.format(overlap=1), TWO_LAYERS, SLOW).step_s == pytest.approx(4.0)
    assert on_line(text.format(overlap=0), TWO_LAYERS, SLOW).step_s == pytest.approx((4 * 4.0 + 2 * 2.0) / 4)
    slower = Line(byte_s=2.5e-6)
    # 5 s for a part: one step later one second is missing, two steps later nothing.
    assert on_line(text.format(overlap=1), TWO_LAYERS, slower).step_s == pytest.approx((4 * 4.0 + 2 * 1.0) / 4)
    assert on_line(text.format(overlap=2), TWO_LAYERS, slower).step_s == pytest.approx(4.0)


def test_gossip_mixes_while_gradients_are_computed() -> None:
    half = Line(byte_s=0.5e-6)
    assert on_line("bsp / gossip / none", TWO_LAYERS, half).step_s == pytest.approx(4.0)
    assert on_line("bsp / gossip / none", TWO_LAYERS, Line(byte_s=2e-6)).step_s == pytest.approx(8.0)
    late = on_line("bsp / gossip / none / sequential", TWO_LAYERS, half)
    assert late.step_s == pytest.approx(4.0 + 2.0)
    with_optimizer = on_line("bsp / gossip / none", TWO_LAYERS, Line(byte_s=2e-6), optimizer_s=1.0)
    assert with_optimizer.step_s == pytest.approx(9.0), "the optimizer's step comes after what was mixed"
    seldom = on_line("local_sgd(period=4) / gossip / none", TWO_LAYERS, Line(byte_s=2e-6))
    assert seldom.step_s == pytest.approx((3 * 4.0 + 8.0) / 4)


def test_pairs_that_average_in_the_background_delay_nobody() -> None:
    found = on_line("asp / gossip / none", TWO_LAYERS, Line(byte_s=1e-5), optimizer_s=0.5)
    assert found.step_s == pytest.approx(4.5)
    assert found.compute_s == pytest.approx(4.5)
    assert found.exposed_s == 0


# -- servers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "exchange_s"),
    [
        (1, 2 * 3 * 8e-3),  # three workers' bytes in, and out
        (2, 2 * 3 * 4e-3),  # each server has half of it, both at the same time
        (4, 2 * 3 * 2e-3),  # tensors are cut, so each of four has a quarter
    ],
)
def test_servers_form_sums(shards: int, exchange_s: float) -> None:
    workload = job((0.01, 0.02, 4 * MEGABYTE), (0.01, 0.02, 4 * MEGABYTE))
    found = simulate(f"bsp / parameter_server(shards={shards}) / none / sequential", workload, hosts(4)).prediction
    assert found.step_s == pytest.approx(0.06 + exchange_s)


def test_both_ways_of_few_servers_are_under_way_at_the_same_time() -> None:
    """With many buckets, each crosses the one server's link once in and once out, and these two overlap."""
    workload = job((0.0, 1e-6, 0), *((0.0, 0.0, MEGABYTE),) * 64)
    one = simulate("bsp / parameter_server(shards=1) / none / wfbp", workload, hosts(9)).prediction.step_s
    assert one == pytest.approx(8 * 64 * MEGABYTE / RATE, rel=0.05), "not twice as long"


def test_without_a_barrier_a_worker_waits_for_its_own_parameters() -> None:
    nbytes = 8 * MEGABYTE
    workload = job((0.01, 0.02, nbytes))
    for rule in ("asp", "ssp"):
        found = simulate(
            f"{rule} / parameter_server / none", workload, hosts(4), conditions=Conditions(optimizer_s=1)
        ).prediction
        assert found.step_s == pytest.approx(0.03 + 2 * 3 * nbytes / RATE), "servers make the optimizer's step"
        assert found.compute_s == pytest.approx(0.03)


def test_dear_takes_what_servers_answer_in_the_next_forward_pass() -> None:
    """What a server answers is taken layer by layer, front layers first; all of it is sent in the backward pass."""
    strategy = "bsp / parameter_server / none / dear(bytes=4)"
    found = on_line(strategy, TWO_LAYERS, SLOW)
    # backward ends at 0; on the link: l1 from -1 until 1, l0 until 3; forward at 3 - 5, backward at 5 - 7
    assert found.step_s == pytest.approx(7.0)
