"""Many jobs on one cluster: traces, policies, scheduling rounds on a virtual clock, and the outcome of every job."""

from laconic.jobs.interleaving import Interleaving, Rhythm, interleave
from laconic.jobs.job import Job, Phase, Traffic
from laconic.jobs.outcome import Outcome, Stay
from laconic.jobs.policies import POLICIES, Policy, parse_policy
from laconic.jobs.rounds import Costs, run
from laconic.jobs.service import Service, read_services
from laconic.jobs.serving import Served
from laconic.jobs.throughputs import Throughputs
from laconic.jobs.trace import parse_trace, read_trace

__all__ = [
    "POLICIES",
    "Costs",
    "Interleaving",
    "Job",
    "Outcome",
    "Phase",
    "Policy",
    "Rhythm",
    "Served",
    "Service",
    "Stay",
    "Throughputs",
    "Traffic",
    "interleave",
    "parse_policy",
    "parse_trace",
    "read_services",
    "read_trace",
    "run",
]
