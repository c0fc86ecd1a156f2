"""The search: every legal plan, nothing that does not fit, the fastest first."""

from __future__ import annotations

from laconic.simulator.parallel.accelerator import H100
from laconic.simulator.parallel.fabric import h100_nodes
from laconic.simulator.parallel.memory import fits, memory
from laconic.simulator.parallel.plan import Plan
from laconic.simulator.parallel.search import plans, search
from laconic.simulator.parallel.software import MEGATRON_CORE
from laconic.simulator.parallel.step import step_time
from laconic.simulator.parallel.system import Job, System
from laconic.workload.transformer_presets import MODELS

SYSTEM = System(accelerator=H100, fabric=h100_nodes(50e9), software=MEGATRON_CORE)


def test_it_finds_the_fastest_that_fits() -> None:
    job = Job(model=MODELS["llama3-70b"], sequence=4096, global_batch=16)
    found = search(job, 32, SYSTEM, keep=5)
    every = list(plans(job, 32))
    assert found.tried == len(every) == len(set(every))
    fitting = [plan for plan in every if fits(memory(job, plan, MEGATRON_CORE), SYSTEM)]
    assert 0 < found.fitting == len(fitting) < len(every)
    fastest = min(step_time(job, plan, SYSTEM).total_s for plan in fitting)
    assert found.best[0].time.total_s <= fastest * 1.001
    assert len(found.best) == 5
    for plan in every:
        plan.check(job.model, gpus=32, sequence=4096)
    assert {plan.tp for plan in every} == {1, 2, 4, 8}


def test_experts_are_spread_in_every_legal_way() -> None:
    job = Job(model=MODELS["mixtral-8x7b"], sequence=4096, global_batch=32)
    every = list(plans(job, 16, zeros=(1,)))
    assert {plan.ep for plan in every} == {1, 2, 4, 8}
    for plan in every:
        plan.check(job.model, gpus=16)


def test_nothing_fits_is_an_answer() -> None:
    job = Job(model=MODELS["llama3-405b"], sequence=8192, global_batch=8)
    found = search(job, 8, SYSTEM)
    assert found.fitting == 0
    assert found.best == ()
    assert found.tried > 0


class _LikesPipelines:
    """An exchange that takes less the more stages there are."""

    def exposed_s(self, job: Job, plan: Plan, system: System, *, before_s: float, backward_s: float) -> float:
        assert before_s > 0
        assert backward_s > 0
        return 1.0 / plan.pp

    def kept_bytes(self, job: Job, plan: Plan, system: System) -> float:
        return 1e12 if plan.tp == 1 else 1e9


def test_a_strategy_exchanges_gradients_in_the_plans_that_are_found() -> None:
    job = Job(model=MODELS["llama3-8b"], sequence=2048, global_batch=16)
    found = search(job, 16, SYSTEM, keep=2, exchange=_LikesPipelines())
    assert all(one.plan.zero == 0 for one in found.best)
    assert all(one.memory.residuals == 1e9 for one in found.best), "with more, none of tp=1 fits"
    assert [one.time.exchange_s for one in found.best] == [1.0 / one.plan.pp for one in found.best]
