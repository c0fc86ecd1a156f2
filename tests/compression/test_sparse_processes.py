"""Compressors on real processes over Gloo: many buckets in flight, several rounds each, the same bits as in threads."""

from __future__ import annotations

import pytest

from tests.compression.sparse_ranks import deep, loss, plain_sgd
from tests.processes import run_processes
from tests.runtime.replicas import assert_equal, train

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(120)]

# Gloo and threads add up plain sums in different orders; all ranks of either get the same bits.
WITH_PLAIN_SUMS = [
    # Sends and sums on their way at the same time.
    "bsp / all_reduce / gtopk(0.1) + error_feedback + per_layer / fusion(4KiB)",
    "bsp / all_reduce / scalecom(0.1) + error_feedback / wfbp",
    "bsp / all_reduce / sketch(0.1, width=0.2) + error_feedback / wfbp",
    "bsp / all_reduce / intsgd / wfbp",
    "bsp / all_reduce / thc / wfbp",
]
STRATEGIES = [
    *WITH_PLAIN_SUMS,
    "bsp / all_reduce / gtopk(0.1) + error_feedback / wfbp",
    "bsp / all_reduce / oktopk(0.1) + error_feedback / wfbp",
    "bsp / all_reduce / qsgd(levels=1) + elias / wfbp",
    "bsp / all_reduce / topk(0.1) + adaptive(first=int8, period=1) + error_feedback / wfbp",
    "bsp / all_reduce / adacomp(8) / wfbp",
    "bsp / all_reduce / threshold(1e-4) + error_feedback / wfbp",
    "bsp / all_reduce / topk(0.1, route=scatter) + error_feedback / wfbp",
]
STEPS = 5


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_as_in_threads(world_size: int) -> None:
    results = run_processes(
        "tests.compression.sparse_ranks:trains",
        world_size=world_size,
        arguments={"strategies": STRATEGIES, "steps": STEPS},
        timeout_s=100,
    )
    for index, strategy in enumerate(STRATEGIES):
        expected = train(deep(), strategy, loss=loss, make_optimizer=plain_sgd, world_size=world_size, steps=STEPS)
        for result, replica in zip(results, expected, strict=True):
            found = result.value[index]
            assert found["num_buckets"] >= 4, strategy
            assert 0 < found["counted"] <= found["predicted"], strategy
            assert found["counted"] == found["predicted"] or not found["exact"], strategy
            assert_equal(found["state"], results[0].value[index]["state"])
            if strategy not in WITH_PLAIN_SUMS:
                assert_equal(found["state"], replica)
