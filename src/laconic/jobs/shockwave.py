"""A real run of 120 jobs on 32 GPUs: one constant is fitted to one policy, then the others are predicted.

Needs three files in one folder:

    shockwave_tacc32_trace.csv       the jobs
    shockwave_tacc_throughputs.csv   their speeds, worker type v100
    shockwave_tacc32_policies.csv    policy,kind,makespan_s,avg_jct_s,...,cluster_util; only the rows of
                                     max_min_fairness are read

The time of a start is fitted to makespan and average completion time on the real GPUs, with the least sum of squared
relative errors of both. Nothing else is fitted:

    rounds of 120 s, each planned when half of the one before is over; what happens later is seen by the next plan
    batches grow after the epochs that the training scripts name (shockwave_batches.py); a job whose batch changes saves
    its state, stops, and starts again in the next round

The 32 GPUs are assumed to be on 8 hosts of 4, which has no effect on times here.

Source: github.com/uw-mad-dash/shockwave (MIT); Zheng et al. 2023 (Shockwave), NSDI, arXiv:2210.00093.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from laconic.cluster import Cluster, Link
from laconic.errors import UsageError
from laconic.jobs.csv_rows import read_lines
from laconic.jobs.job import Job
from laconic.jobs.outcome import Outcome
from laconic.jobs.policies import parse_policy
from laconic.jobs.rounds import Costs, run
from laconic.jobs.shockwave_batches import by_epochs
from laconic.jobs.throughputs import Throughputs
from laconic.jobs.trace import read_trace

CALIBRATED_ON = "max_min_fairness"
PREDICTED = ("allox", "finish_time_fairness", "max_sum_throughput", "min_total_duration")
TRACE, SPEEDS, OUTCOMES = (
    "shockwave_tacc32_trace.csv",
    "shockwave_tacc_throughputs.csv",
    "shockwave_tacc32_policies.csv",
)
_WORKER = "v100"
_HOSTS, _GPUS_PER_HOST, _ROUND_S = 8, 4, 120.0
_COARSE_S, _FINE_S = 5, 1
_LONGEST_START_S = 60


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The published outcome of the policy that the constant is fitted to."""

    makespan_s: float
    average_completion_s: float
    own_gpu_s: float
    """GPU-seconds of the jobs without starts: those in which the authors' simulation had GPUs busy."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The fitted time of a start, and how well it reproduces the outcome that it was fitted to."""

    start_s: float
    makespan_error: float
    completion_error: float
    own_gpu_s_error: float
    """Error of the jobs' own GPU-seconds, which nothing was fitted to."""


@dataclass(frozen=True, eq=False)
class Tables:
    """The files."""

    folder: Path

    def jobs(self) -> list[Job]:
        """The trace."""
        jobs = read_trace(self.folder / TRACE, Throughputs.load(self.folder / SPEEDS, _WORKER), growth=by_epochs)
        # The table's speeds on several hosts are those of Gavel's cluster, whose network was far slower.
        return [replace(job, spread_slowdown=1.0) for job in jobs]

    def measured(self) -> Measured:
        """The two rows of the policy to calibrate on."""
        needed = ("policy", "kind", "makespan_s", "avg_jct_s", "cluster_util")
        lines = read_lines(self.folder / OUTCOMES, needed, ("geo_mean_jct_s", "unfair_share"))
        rows = {line.text("kind"): line for line in lines if line.text("policy") == CALIBRATED_ON}
        for kind in ("physical", "simulation"):
            if kind not in rows:
                raise UsageError(f"{OUTCOMES}: there is no row {CALIBRATED_ON},{kind}, which calibration needs.")
        simulated = rows["simulation"]
        return Measured(
            makespan_s=rows["physical"].number("makespan_s"),
            average_completion_s=rows["physical"].number("avg_jct_s"),
            own_gpu_s=simulated.number("cluster_util") * simulated.number("makespan_s") * _HOSTS * _GPUS_PER_HOST,
        )


def calibrate(tables: Tables) -> Calibration:
    """Fit the time of a start."""
    measured, jobs = tables.measured(), tables.jobs()

    def errors(start_s: float) -> tuple[float, float]:
        found = predict(jobs, CALIBRATED_ON, start_s)
        return (
            found.makespan_s / measured.makespan_s - 1,
            found.average_completion_s / measured.average_completion_s - 1,
        )

    tried: dict[int, tuple[float, float]] = {}

    def best(starts_s: Sequence[int]) -> int:
        for start_s in starts_s:
            if start_s not in tried:
                tried[start_s] = errors(start_s)
        return min(tried, key=lambda start_s: sum(error**2 for error in tried[start_s]))

    near = best(range(0, _LONGEST_START_S + 1, _COARSE_S))
    start_s = best(range(max(0, near - _COARSE_S + 1), near + _COARSE_S, _FINE_S))
    makespan_error, completion_error = tried[start_s]
    return Calibration(
        start_s=float(start_s),
        makespan_error=makespan_error,
        completion_error=completion_error,
        own_gpu_s_error=sum(job.gpus * job.duration_s for job in jobs) / measured.own_gpu_s - 1,
    )


def predict(jobs: Sequence[Job], policy: str, start_s: float) -> Outcome:
    """One policy on the cluster of the run."""
    cluster = Cluster(
        links=(Link(bandwidth_bps=100e9, delay_s=2e-6),) * _HOSTS,
        devices_per_host=_GPUS_PER_HOST,
        inside=Link(bandwidth_bps=100e9, delay_s=1e-6),
    )
    costs = Costs(round_s=_ROUND_S, start_s=start_s, ahead_s=_ROUND_S / 2, stops_to_grow=True)
    return run(jobs, cluster, parse_policy(policy), costs, fidelity="throughput")
