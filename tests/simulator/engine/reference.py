"""The engine's rules once more: slowly, in plain Python, without any of its code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

SAME = 1e-9
"""What is nearer than this, relatively, is meant to be the same time."""


def slow_fair_rates(
    capacity: Sequence[float], routes: Sequence[Sequence[int]], multiplicity: Sequence[int] | None = None
) -> list[float]:
    """Let all flows grow together; stop those that cross a link when it is full."""
    counts = [1] * len(routes) if multiplicity is None else list(multiplicity)
    rates = [0.0 if links else math.inf for links in routes]
    growing = {flow for flow, links in enumerate(routes) if links}
    while growing:
        room = {}
        for link, most in enumerate(capacity):
            crossing = [flow for flow, links in enumerate(routes) for other in links if other == link]
            weight = sum(counts[flow] for flow in crossing if flow in growing)
            if weight:
                room[link] = (most - sum(counts[flow] * rates[flow] for flow in crossing)) / weight
        step = min(room.values())
        for flow in growing:
            rates[flow] += step
        full = {link for link, left in room.items() if left - step <= SAME * max(capacity)}
        growing = {flow for flow in growing if not full & set(routes[flow])}
    return rates


@dataclass
class Flow:
    links: tuple[int, ...]
    left: float


@dataclass
class Task:
    duration_s: float
    resource: int = -1
    priority: float = 0.0
    after: tuple[int, ...] = ()
    flows: list[Flow] = field(default_factory=list)


def list_schedule(
    tasks: Sequence[Task], resource_capacity: Sequence[int], link_capacity: Sequence[float] = ()
) -> tuple[list[float], list[float]]:
    """When each task starts and ends."""
    start: dict[int, float] = {}
    end: dict[int, float] = {}
    flowing: dict[int, list[Flow]] = {}
    lasts_until: dict[int, float] = {}
    now = 0.0
    while len(end) < len(tasks):
        # Everything that ends now, and what that lets start without a resource.
        going = True
        while going:
            going = False
            for number, until in list(lasts_until.items()):
                if until <= now * (1 + SAME):
                    end[number] = until
                    del lasts_until[number]
                    going = True
            ready = [n for n, task in enumerate(tasks) if n not in start and all(b in end for b in task.after)]
            chosen = [n for n in ready if tasks[n].resource < 0]
            if not going and not chosen:
                waiting = sorted((tasks[n].priority, n) for n in ready)
                for _, n in waiting:
                    where = tasks[n].resource
                    held = [m for m in start if m not in end and tasks[m].resource == where]
                    if len(held) + sum(tasks[m].resource == where for m in chosen) < resource_capacity[where]:
                        chosen.append(n)
            for n in chosen:
                start[n] = now
                going = True
                flowing[n] = [flow for flow in tasks[n].flows if flow.links and flow.left > 0]
                if not flowing[n]:
                    del flowing[n]
                    lasts_until[n] = now + tasks[n].duration_s
        flows = [flow for several in flowing.values() for flow in several]
        rates = slow_fair_rates(link_capacity, [flow.links for flow in flows])
        moments = list(lasts_until.values())
        moments += [now + flow.left / rate for flow, rate in zip(flows, rates, strict=True)]
        if not moments:
            break
        step = min(moments) - now
        for flow, rate in zip(flows, rates, strict=True):
            flow.left = flow.left - step * rate if flow.left / rate > step * (1 + SAME) + now * SAME else 0.0
        now += step
        for n in list(flowing):
            flowing[n] = [flow for flow in flowing[n] if flow.left > 0]
            if not flowing[n]:
                del flowing[n]
                lasts_until[n] = now + tasks[n].duration_s
    return [start[n] for n in range(len(tasks))], [end[n] for n in range(len(tasks))]
