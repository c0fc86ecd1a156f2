"""Laconic strategies on the data-parallel dimension, and between sites."""

from __future__ import annotations

from dataclasses import replace

import pytest

from laconic.cluster import Link
from laconic.errors import ConfigurationError
from laconic.simulator.parallel.accelerator import H100
from laconic.simulator.parallel.exchange import Islands, StrategyExchange
from laconic.simulator.parallel.fabric import h100_nodes
from laconic.simulator.parallel.plan import Plan
from laconic.simulator.parallel.software import Software
from laconic.simulator.parallel.step import step_time
from laconic.simulator.parallel.system import Job, System
from laconic.simulator.parallel.traffic import step_traffic
from laconic.strategy import Strategy
from laconic.workload.transformer_presets import MODELS

PLAIN = Software(name="plain", gradient_bytes=4)
SYSTEM = System(accelerator=H100, fabric=h100_nodes(2e9), software=PLAIN)
JOB = Job(model=MODELS["llama3-8b"], sequence=2048, global_batch=64)
PLAN = Plan(dp=8, tp=8, sequence_parallel=True)


def _exposed(strategy: str) -> float:
    return step_time(JOB, PLAN, SYSTEM, exchange=StrategyExchange(strategy)).exchange_s


def test_an_exchange_after_the_backward_pass_takes_what_the_frameworks_own_takes() -> None:
    own = step_time(JOB, PLAN, SYSTEM).exchange_s
    assert _exposed("bsp / all_reduce(algorithm=ring) / none / sequential") == pytest.approx(own, rel=0.02)


def test_bytes_are_those_of_the_plan() -> None:
    exchange = StrategyExchange("bsp / all_reduce(algorithm=ring) / none / sequential")
    found = exchange.prediction(JOB, PLAN, SYSTEM, before_s=1.0, backward_s=0.5)
    assert found is not None
    assert found.wire_bytes == pytest.approx(step_traffic(JOB, PLAN, PLAIN).data, rel=1e-6)


def test_what_a_strategy_keeps_counts() -> None:
    """Error feedback of a sparsifier keeps a 32-bit value per parameter of the rank; a plain exchange nothing."""
    rank = JOB.model.num_parameters / 8
    kept = StrategyExchange("bsp / all_reduce / topk + error_feedback / fusion").kept_bytes(JOB, PLAN, SYSTEM)
    assert kept == pytest.approx(4 * rank, rel=1e-3)
    assert StrategyExchange("ddp").kept_bytes(JOB, PLAN, SYSTEM) == 0
    uplink = Link(bandwidth_bps=1e9)
    assert Islands(Strategy.parse("diloco(period=50)"), 2, uplink).kept_bytes(JOB, PLAN, SYSTEM) > 4 * rank


def test_less_and_rarer_exchanges_expose_less() -> None:
    whole, half, rare = (_exposed(name) for name in ("ddp", "ddp-bf16", "diloco(period=100)"))
    assert whole > half > rare > 0


def test_sites_exchange_over_their_uplinks() -> None:
    plan, uplink = Plan(tp=8, sequence_parallel=True), Link(bandwidth_bps=1e9, delay_s=0.01)
    job = replace(JOB, global_batch=8)
    alone = step_time(job, plan, SYSTEM)
    between = step_time(job, plan, SYSTEM, exchange=Islands(Strategy.parse("diloco(period=50)"), 8, uplink))
    # A ring of 8 over the uplink, every 50th step: 2 x 7/8 of the model in 32 bits.
    expected = 2 * 7 / 8 * 4 * JOB.model.num_parameters * 8 / 1e9 / 50
    assert between.total_s - alone.total_s == pytest.approx(expected, rel=0.05)
    one = step_time(job, plan, SYSTEM, exchange=Islands(Strategy.parse("diloco(period=50)"), 1, uplink))
    assert one == alone


@pytest.mark.parametrize(
    ("plan", "expected"), [(replace(PLAN, zero=1), "Give zero=0"), (replace(PLAN, ep=2), "Give ep=1")]
)
def test_what_is_not_modelled_is_refused(plan: Plan, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        step_time(replace(JOB, model=MODELS["mixtral-8x7b"]), plan, SYSTEM, exchange=StrategyExchange("ddp"))
