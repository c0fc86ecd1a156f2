"""One sentence about simulated rows: which strategy to take, by the time to plain DDP's loss where that is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from laconic.losses import Scale, loss_cost
from laconic.planner.question import USUAL_STEPS
from laconic.planner.words import name_of
from laconic.simulator.sweep import Row
from laconic.strategy import Strategy
from laconic.units import human_factor
from laconic.workload import IMAGE_WORKLOADS, Workload

_CLOSE = 1.02


def verdict_of_rows(rows: Sequence[Row], workload: Workload) -> str:
    """The best strategy of every setting; empty if nothing was predicted."""
    settings = {id(row.setting): row.setting for row in rows}
    found = [_of_setting([row for row in rows if row.setting is setting], workload) for setting in settings.values()]
    best = [one for one in found if one is not None]
    if not best:
        return ""
    if len(best) == 1:
        return best[0][1]
    counted = Counter(name_of(strategy) for strategy, _ in best).most_common()
    told = ", ".join(f"{name} in {number}" for name, number in counted)
    return f"Of {len(best)} settings the best by time to plain DDP's loss, where that is known: {told}."


def _of_setting(rows: Sequence[Row], workload: Workload) -> tuple[Strategy, str] | None:
    steps: dict[Strategy, float] = {row.strategy: row.prediction.step_s for row in rows if row.prediction is not None}
    if not steps:
        return None
    setting = rows[0].setting
    scale = Scale(
        num_parameters=workload.num_parameters,
        workers=setting.workers,
        hosts=-(-setting.workers // setting.cluster.devices_per_host),
        steps=USUAL_STEPS,
    )
    costs = {strategy: loss_cost(strategy, scale) for strategy in steps}
    # Losses were measured with text.
    known = ("same",) if workload.name in IMAGE_WORKLOADS else ("same", "measured", "published")
    times = {
        strategy: step_s * cost.ratio
        for strategy, step_s in steps.items()
        if (cost := costs[strategy]) is not None and cost.known in known and strategy.synchronization.barrier
    }
    fastest = min(steps, key=lambda strategy: steps[strategy])
    if not times:
        return fastest, f"Fastest step: {name_of(fastest)}; what any of these costs in loss was not measured."
    best = min(times, key=lambda strategy: times[strategy])
    plain = times.get(Strategy())
    sentence = f"Best by time to plain DDP's loss, where that is known: {name_of(best)}"
    if plain is not None and best != Strategy():
        sentence += f", {human_factor(plain / times[best])} times sooner than plain DDP"
        cost = costs[best]
        if cost is not None and cost.known != "same":
            low, high = (plain / steps[best] / ratio for ratio in (cost.ratio_high, cost.ratio_low))
            sentence += f" ({human_factor(low, 2)} to {human_factor(high, 2)} by the range of its loss)"
            same = [strategy for strategy, known in costs.items() if known is not None and known.known == "same"]
            exact = min(same, key=lambda strategy: times[strategy])
            if exact != Strategy():
                exactly = human_factor(plain / times[exact])
                sentence += f"; {name_of(exact)} computes the same as plain DDP and is {exactly} times sooner"
    if fastest != best and times[best] > _CLOSE * steps[fastest]:
        cost = costs[fastest]
        why = (
            "and its loss was not measured with such a model"
            if fastest not in times or cost is None
            else f"and needs about {human_factor(cost.ratio, 2)} times the steps"
        )
        times_as_fast = steps[best] / steps[fastest]
        sentence += f"; {name_of(fastest)} has the fastest step, {human_factor(times_as_fast, 2)} times as fast, {why}"
    return best, f"{sentence}. laconic plan searches more strategies and settings."
