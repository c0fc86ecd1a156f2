"""Scheduling rounds on a virtual clock: plan, place, run, until every job has ended.

For each round the policy puts the jobs that are present in an order; they get GPUs until none are left. A job that goes
on with the same number of GPUs stays where it is. Any other start costs time, in which its GPUs are idle. GPUs of a
job that ends within a round are free from the next one on.

A round may be planned before it begins (`Costs.ahead_s`). The plan does not know what happens later: jobs that come
then wait for the next round, and GPUs that were given to a job that ends meanwhile stay idle for a whole round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from laconic.cluster import Cluster
from laconic.cluster.fabric import Floats, Indices
from laconic.errors import UsageError, one_line
from laconic.jobs.job import Job
from laconic.jobs.moving import Moving
from laconic.jobs.outcome import Outcome, Stay
from laconic.jobs.policies import Policy, Turn, View
from laconic.jobs.pool import GpuPool, Placement
from laconic.jobs.progress import Progress
from laconic.jobs.service import Service
from laconic.jobs.serving import Serving
from laconic.jobs.speeds import Fidelity, Place, Speeds
from laconic.jobs.trace import checked

if TYPE_CHECKING:
    from laconic.jobs.strategy_prices import StrategyPrices

_MOST_ROUNDS = 2_000_000


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of scheduling itself."""

    round_s: float = 120.0
    """Length of a round."""
    start_s: float = 0.0
    """From getting GPUs to the first step: processes, data, memory, state."""
    checkpoint_s: float = 0.0
    """To save a job's state when it loses its GPUs; counted when it starts again."""
    migration_s: float = 0.0
    """Additional time to continue on other hosts than before."""
    ahead_s: float = 0.0
    """How long before its beginning a round is planned; what happens later is seen by the next plan."""
    stops_to_grow: bool = False
    """Whether a job whose batch changes saves its state, stops, and starts again in the next round."""

    def __post_init__(self) -> None:
        for name in ("start_s", "checkpoint_s", "migration_s", "ahead_s"):
            if not 0 <= getattr(self, name) < 1e6:
                raise UsageError(f"{name} must be between 0 and 1e6, got {getattr(self, name):g}.")
        if not 0 < self.round_s < 1e6:
            raise UsageError(f"round_s must be above 0 and below 1e6, got {self.round_s:g}.")
        whole_s = self.start_s + self.checkpoint_s + self.migration_s
        if whole_s >= self.round_s:
            raise UsageError(
                f"start, checkpoint and migration take {whole_s:g} s together, but a round only {self.round_s:g} s: a "
                "job that has to start in every round would make no progress. Give longer rounds."
            )
        if self.ahead_s > self.round_s:
            raise UsageError(f"ahead_s must be at most round_s = {self.round_s:g}, got {self.ahead_s:g}.")


def run(
    jobs: Sequence[Job],
    cluster: Cluster,
    policy: Policy,
    costs: Costs | None = None,
    *,
    fidelity: Fidelity = "flow",
    prices: StrategyPrices | None = None,
    services: Sequence[Service] = (),
) -> Outcome:
    """Let all jobs run under a policy, on the GPUs that inference services leave them.

    fidelity: "flow" lets jobs on several hosts share links; "throughput" models GPUs only.
    prices: bytes and steps of strategies; computed when needed if left out.
    """
    return _Run(checked(jobs), cluster, policy, costs or Costs(), fidelity, prices, services).until_all_end()


@dataclass(frozen=True, eq=False)
class _Round:
    """The jobs that run, one entry of each array per job."""

    number: Indices
    start_s: Floats
    """What is left of the time that its start takes."""
    speed: Floats
    gpus: Indices


@dataclass(eq=False)
class _Run:
    jobs: list[Job]
    cluster: Cluster
    policy: Policy
    costs: Costs
    fidelity: Fidelity
    prices: StrategyPrices | None
    services: Sequence[Service]
    places: dict[int, Place] = field(default_factory=dict)
    stays: list[Stay] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Policies see jobs by number, in order of arrival.
        self.jobs.sort(key=lambda job: job.arrival_s)
        _check_fits(self.jobs, self.cluster)
        count = len(self.jobs)
        self.pool = GpuPool(self.cluster.num_hosts, self.cluster.devices_per_host, self.cluster.rack_of)
        self.speeds = Speeds(self.jobs, self.cluster, self.policy, self.fidelity, self.prices)
        self.progress = Progress(self.jobs)
        self.gpus = np.array([job.gpus for job in self.jobs], dtype=np.int64)
        self.arrival_s = np.array([job.arrival_s for job in self.jobs])
        self.finish_s = np.full(count, math.nan)
        self.received_s = np.zeros(count)
        self.last_speed = self.speeds.first_guess(self.progress.steps_per_s(np.arange(count)))
        self.last_hosts: dict[int, Placement] = {}
        self.number_of = {job.name: number for number, job in enumerate(self.jobs)}
        self.followers: dict[int, list[int]] = {}
        for number, job in enumerate(self.jobs):
            if job.after:
                self.followers.setdefault(self.number_of[job.after], []).append(number)
        self.num_starts, self.busy_gpu_s = 0, 0.0
        nobody = np.zeros(0, dtype=np.int64)
        self.round = _Round(nobody, np.zeros(0), np.zeros(0), nobody)
        self.has_changed = False
        self.serving = Serving(self.services, self.costs.start_s)

    def until_all_end(self) -> Outcome:
        """Run round after round until all jobs have ended."""
        chooser = self.policy.start()
        self.waiting = sorted(
            (number for number, job in enumerate(self.jobs) if not job.after),
            key=lambda n: (-self.arrival_s[n], -n),
        )
        self.here: set[int] = set()
        now_s, rounds, num_gpus = 0.0, 0, self.cluster.num_devices
        length_s, ahead_s = self.costs.round_s, self.costs.ahead_s
        while self.waiting or self.here or now_s < self.serving.last_end_s:
            # The first round is planned when it begins.
            seen_s = now_s - (ahead_s if rounds else 0.0)
            while self.waiting and self.arrival_s[self.waiting[-1]] <= seen_s:
                self.here.add(self.waiting.pop())
                self.has_changed = True
            if not self.here and now_s >= self.serving.last_end_s:
                late_s = float(self.arrival_s[self.waiting[-1]]) - seen_s
                now_s += length_s * max(1, math.ceil(late_s / length_s))
                continue
            num_gpus, before = self.serving.plan(self.cluster.num_devices, now_s, now_s + length_s), num_gpus
            self.has_changed |= num_gpus != before
            active = np.array(sorted(self.here), dtype=np.int64)
            turn = Turn(active[:0], active)
            if num_gpus and len(active):
                view = self._view(active, seen_s, num_gpus)
                self.has_changed = False
                turn = chooser.choose(view)
            self._run_for(now_s - seen_s, seen_s)
            self._place(active, turn, num_gpus, now_s)
            self._run_for(length_s - ahead_s, now_s)
            now_s += length_s
            rounds += 1
            if rounds > _MOST_ROUNDS:
                raise UsageError(f"after {rounds} rounds {len(self.here)} jobs still run. Give longer rounds.")
        return self._outcome(rounds)

    def _view(self, active: Indices, now_s: float, num_gpus: int) -> View:
        return View(
            now_s=now_s,
            num_gpus=num_gpus,
            round_s=self.costs.round_s,
            has_changed=self.has_changed,
            number=active,
            jobs=self.jobs,
            gpus=self.gpus[active],
            age_s=now_s - self.arrival_s[active],
            left_s=self.progress.left_s(active),
            speed=self.last_speed[active],
            steps_per_s=self.progress.steps_per_s(active),
            received_s=self.received_s[active],
            done=self.progress.done[active],
        )

    def _place(self, active: Indices, turn: Turn, num_gpus: int, now_s: float) -> None:
        """Allocate GPUs to jobs; GPUs of jobs that have ended since the round was planned stay idle."""
        left = num_gpus
        chosen: dict[int, int] = {}
        for place in turn.order.tolist():
            if left == 0:
                break
            wanted = int(turn.gpus[place])
            if 0 < wanted <= left:
                chosen[int(active[place])] = wanted
                left -= wanted
        chosen = {number: count for number, count in chosen.items() if number in self.here}
        for number in [number for number, old in self.places.items() if chosen.get(number) != old.gpus]:
            self._leave(number, now_s)
        self.serving.shrink(self.pool)
        self.serving.grow(self.pool, now_s, now_s + self.costs.round_s)
        moving = self._moving(now_s)
        if self.policy.migrates:
            slow = np.array(moving.slow(), dtype=np.int64)
            lost_s = self.progress.left_s(slow) * (1 / self.last_speed[slow] - 1)
            moving.gather(dict(zip(slow.tolist(), lost_s.tolist(), strict=True)))
        new = sorted((number for number in chosen if number not in self.places), key=lambda n: (-chosen[n], n))
        starts: dict[int, float] = {}
        for number in new:
            if self.policy.migrates:
                # Jobs on a single GPU come last, also those that make room.
                new += moving.make_room(chosen[number], self._lost_if_cut_s(number))
            placement = self.pool.take(chosen[number], self.policy.placement_rule)
            before = self.last_hosts.get(number)
            cost_s = self.costs.start_s
            if before is not None:
                cost_s += self.costs.checkpoint_s + (self.costs.migration_s if before != placement else 0.0)
            self.places[number] = Place(placement, chosen[number], now_s)
            starts[number] = cost_s
        self.num_starts += len(new)
        start_s = {number: starts.get(number, 0.0) for number in self.places}
        numbers = np.array(list(start_s), dtype=np.int64)
        places = [self.places[number] for number in start_s]
        speed = self.speeds.of(numbers, places, self.progress.steps_per_s(numbers), now_s)
        self.last_speed[numbers] = speed
        self.round = _Round(numbers, np.array(list(start_s.values())), speed, np.array([at.gpus for at in places]))

    def _moving(self, now_s: float) -> Moving:
        return Moving(
            self.pool,
            self.places,
            self.policy.placement_rule,
            self.costs.start_s + self.costs.checkpoint_s + self.costs.migration_s,
            lambda number: self._leave(number, now_s),
            lambda number: float(self.progress.left_s(np.array([number]))[0]),
        )

    def _lost_if_cut_s(self, number: int) -> float:
        """The time that links cost a job for the rest of its work if it is alone on two hosts."""
        one = np.array([number])
        speed = self.speeds.alone(one, self.progress.steps_per_s(one), 2)
        return float((self.progress.left_s(one) * (1 / speed - 1))[0])

    def _leave(self, number: int, now_s: float) -> None:
        place = self.places.pop(number)
        self.pool.give_back(place.placement)
        self.last_hosts[number] = place.placement
        self.stays.append(
            Stay(
                job=number,
                begin_s=place.begin_s,
                end_s=now_s,
                gpus=place.gpus,
                placement=place.placement,
                strategy=place.strategy,
            )
        )

    def _run_for(self, seconds: float, now_s: float) -> None:
        """Let the jobs of the round run on for `seconds`; free the GPUs of those that end or stop."""
        running = self.round
        if not seconds or not len(running.number):
            return
        start_s = np.minimum(running.start_s, seconds)
        before = self.progress.phase[running.number].copy()
        ran_s = self.progress.advance(running.number, seconds - start_s, running.speed, stops=self.costs.stops_to_grow)
        used_s = start_s + ran_s
        self.received_s[running.number] += used_s
        self.busy_gpu_s += float(used_s @ running.gpus)
        done = self.progress.is_done(running.number)
        grown = (self.progress.phase[running.number] != before) & ~done
        self.has_changed |= bool(done.any() or grown.any())
        gone = done | grown if self.costs.stops_to_grow else done
        for place in np.flatnonzero(gone).tolist():
            number, end_s = int(running.number[place]), now_s + float(used_s[place])
            self._leave(number, end_s)
            if done[place]:
                self._end(number, end_s)
        self.round = _Round(
            *(array[~gone] for array in (running.number, running.start_s - start_s, running.speed, running.gpus))
        )

    def _end(self, number: int, end_s: float) -> None:
        self.finish_s[number] = end_s
        self.here.remove(number)
        for follower in self.followers.get(number, ()):
            self.arrival_s[follower] = max(self.arrival_s[follower], end_s)
            self.waiting.append(follower)
            self.waiting.sort(key=lambda n: (-self.arrival_s[n], -n))

    def _outcome(self, rounds: int) -> Outcome:
        assert not self.places, "every job has ended"
        links, loads = self.speeds.links, self.speeds.loads
        names = [links.name(link) for link in range(links.num_links)] if links is not None else []
        return Outcome(
            policy=str(self.policy),
            jobs=self.jobs,
            num_gpus=self.cluster.num_devices,
            arrival_s=self.arrival_s,
            finish_s=self.finish_s,
            stays=self.stays,
            served=self.serving.outcome(),
            num_rounds=rounds,
            num_starts=self.num_starts,
            busy_gpu_s=self.busy_gpu_s,
            link_names=names,
            load_times_s=np.array([time_s for time_s, _ in loads]),
            link_load=np.array([load for _, load in loads]) if loads else np.zeros((0, len(names))),
        )


def _check_fits(jobs: Sequence[Job], cluster: Cluster) -> None:
    for job in jobs:
        if job.gpus > cluster.num_devices:
            raise UsageError(
                f'job "{one_line(job.name, 60)}" asks for {job.gpus} GPUs, but the cluster has {cluster.num_devices}. '
                "Give more --hosts, or leave the job out."
            )
