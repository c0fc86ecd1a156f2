"""Dispatch and combine: copies by counting, time by the slower of copying and the NIC."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.cluster.collective_costs import ExpertAllToAll, Routing
from laconic.errors import UsageError


@pytest.mark.parametrize("nodes", [1, 2, 4, 8])
def test_copies_agree_with_routing_tokens_one_by_one(nodes: int) -> None:
    routing = Routing(gpus=8 * nodes, nodes=nodes, experts=256, experts_per_token=8)
    generator = random.Random(nodes)
    per_node, per_gpu, tokens = 256 // nodes, 256 // (8 * nodes), 1500
    nodes_reached = gpus_reached = 0
    for _ in range(tokens):
        scores = [generator.random() for _ in range(256)]
        best = sorted(range(nodes), key=lambda node: -max(scores[node * per_node : (node + 1) * per_node]))
        allowed = set(best[: routing.most_nodes])
        chosen = sorted((e for e in range(256) if e // per_node in allowed), key=lambda e: -scores[e])[:8]
        nodes_reached += len({expert // per_node for expert in chosen})
        gpus_reached += len({expert // per_gpu for expert in chosen})
    assert routing.nodes_reached == pytest.approx(nodes_reached / tokens, rel=0.02)
    assert routing.gpus_reached == pytest.approx(gpus_reached / tokens, rel=0.02)
    assert routing.nodes_away == pytest.approx(routing.nodes_reached * (nodes - 1) / nodes)


def test_large_batches_are_bound_by_the_nic_between_nodes_and_by_copying_inside() -> None:
    tokens = 1 << 22
    one = ExpertAllToAll(routing=Routing(gpus=8, nodes=1), hidden=7168)
    assert one.nic_s("dispatch") == 0
    assert one.seconds("dispatch", tokens) == pytest.approx(tokens * one.sm_s("dispatch"), rel=1e-3)
    four = ExpertAllToAll(routing=Routing(gpus=32, nodes=4), hidden=7168, sms=24)
    sent = 7168 * 2 * four.routing.nodes_away * tokens
    assert four.seconds("combine", tokens) == pytest.approx(sent / 44e9, rel=1e-3)
    assert one.sm_s("combine") == pytest.approx(
        2 * ExpertAllToAll(routing=one.routing, hidden=7168, sms=40).sm_s("combine")
    )


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 100_000),
    nodes=st.sampled_from([1, 2, 4, 8]),
    sms=st.integers(1, 64),
    direction=st.sampled_from(["dispatch", "combine"]),
)
def test_more_tokens_or_fewer_multiprocessors_never_take_less_time(
    tokens: int, nodes: int, sms: int, direction: str
) -> None:
    routing = Routing(gpus=8 * nodes, nodes=nodes)
    here = ExpertAllToAll(routing=routing, hidden=4096, sms=sms)
    more = ExpertAllToAll(routing=routing, hidden=4096, sms=sms + 1)
    assert here.seconds(direction, tokens) < here.seconds(direction, tokens + 1)  # pyrefly: ignore
    assert more.seconds(direction, tokens) <= here.seconds(direction, tokens)  # pyrefly: ignore


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"nodes": 3}, "cannot be spread evenly over 3 nodes"),
        ({"experts": 100}, "Use a multiple of 16 experts"),
        ({"experts_per_token": 0}, "0 experts per token cannot be drawn"),
        ({"most_nodes": 0}, "cannot be drawn"),
    ],
)
def test_routings_that_cannot_be_are_refused(change: dict[str, int], expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        Routing(**({"gpus": 16, "nodes": 2} | change))
    assert expected in str(caught.value)
    with pytest.raises(UsageError, match="at least 1"):
        ExpertAllToAll(routing=Routing(gpus=16, nodes=2), hidden=7168).seconds("dispatch", 0)
